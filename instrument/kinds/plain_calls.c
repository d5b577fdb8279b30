/* What hooks do with a call of a module that needs no Python code: every site records the output, which is one plain tensor, or
   its gradient. `instrument.kinds.module_tensors` composes it when schedules change, and handles all other calls.

   connect_torch(transform, backward pass, is grad enabled, packing hooks, ordered dict, firing)

   Sets functions of PyTorch that describe the state of this thread, the class of the dictionary of a tensor's hooks, and a function
   that returns the `Firing` with the given fields.

   Counts: the attributes `opportunities` and `firings` of `HookCoverage`.

   CallCounter: the indices of a module's calls

   micro_step_index: the micro-step of the latest call. latest: the index of the latest call outside of checkpoint segments; -1 for
   none. is_open: whether a call that `PlainCalls.enter` began has not ended. open_micro_step: the micro-step in which it began.
   begin(micro-step): in another micro-step than before, indices start at 0 again.
   take() -> int: returns the next index.
   pop() -> int or None: ends the open call, and returns its index. None if there is none, or if it belongs to another thread.

   Recording(slab, counts, clock, slots, module, with_magnitudes, at_boundary, in_recomputation)

   What a site does that records statistics of plain tensors. `slots` has the slots of the rows, with a key (path, firing, class of
   the module). Calling it with a tensor, its path and the firing adds a row. It returns the tensor, or None if it is not plain, or if
   the pass is recomputed and the argument says that nothing is recorded then.

   PlainCalls(clock, counter, outputs, gradients, finish)

   `outputs` and `gradients` are tuples of recordings. `finish(done, call, backward, gradient)` is called for the recordings of a gradient
   after the first `done` ones; it returns what the hook of the gradient returns.

   enter() -> bool: begins a call before the module runs. False if the call needs Python code: it runs in a backward pass, without
   gradients, with hooks on saved tensors, or under a transform of torch.func; or a call of the module is open already, in this
   micro-step or in another thread.
   leave(output) -> int: ends the call after the module has run. -1 if everything is done. Otherwise the call stays open, and the
   result is how many of `outputs` have recorded it. */

#include "../stats/native.h"
#include <structmember.h>

enum { TRANSFORM, BACKWARD_PASS, GRAD_ENABLED, PACKING_HOOKS, ORDERED_DICT, FIRING, FUNCTIONS };
static PyObject *functions[FUNCTIONS];

#define NAMES(NAME)                                                                                                   \
    NAME(closed) NAME(micro_step_index) NAME(moment) NAME(boundary) NAME(requires_grad) NAME(grad_fn) NAME(_base)     \
        NAME(_backward_hooks) NAME(_register_hook_dict) NAME(recompute)
#define DECLARE(NAME) static PyObject *name_##NAME;
NAMES(DECLARE)

static PyObject *no_path, *minus_one;

static PyObject *connect_torch(PyObject *self, PyObject *args) {
    PyObject *given[FUNCTIONS];
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOO", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5]))
        return NULL;
    for (int i = 0; i < FUNCTIONS; i++) {
        PyObject *old = functions[i];
        functions[i] = Py_NewRef(given[i]);
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

/* Whether an attribute, or the result of a call, is an expected object. -1 with an exception set. Takes the reference. */
static int is_object(PyObject *found, PyObject *expected) {
    Py_XDECREF(found);
    return found ? found == expected : -1;
}

static int attribute_is(PyObject *object, PyObject *name, PyObject *expected) {
    return is_object(PyObject_GetAttr(object, name), expected);
}

/* Objects whose references the garbage collector can follow. `count` of them are at the start of each type's fields. */
typedef struct {
    PyObject_HEAD PyObject *references[];
} Holder;

#define HOLDER(TYPE, COUNT)                                                                                           \
    static int TYPE##_traverse(PyObject *self, visitproc visit, void *arg) {                                          \
        for (int i = 0; i < (COUNT); i++)                                                                             \
            Py_VISIT(((Holder *)self)->references[i]);                                                                \
        Py_VISIT(Py_TYPE(self));                                                                                      \
        return 0;                                                                                                     \
    }                                                                                                                 \
    static int TYPE##_clear(PyObject *self) {                                                                         \
        for (int i = 0; i < (COUNT); i++)                                                                             \
            Py_CLEAR(((Holder *)self)->references[i]);                                                                \
        return 0;                                                                                                     \
    }

static void release(PyObject *self, inquiry clear) {
    PyTypeObject *class = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(class, Py_tp_free))(self);
    Py_DECREF(class);
}

/* ---------------------------------------------------------------------------------------------------------------- counts */

typedef struct {
    PyObject_HEAD long long opportunities, firings;
} Counts;

static PyMemberDef counts_members[] = {
    {"opportunities", T_LONGLONG, offsetof(Counts, opportunities), 0, NULL},
    {"firings", T_LONGLONG, offsetof(Counts, firings), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot counts_slots[] = {
    {Py_tp_doc, "The opportunities and firings of a site."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, counts_members},
    {0, NULL},
};

static PyType_Spec counts_spec = {
    "instrument.stats.native.Counts", sizeof(Counts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, counts_slots};

/* ---------------------------------------------------------------------------------------------------------------- indices of calls */

typedef struct {
    PyObject_HEAD long long micro_step_index, next, latest, open_index, open_micro_step;
    unsigned long thread; /* of the open call */
    char is_open;
} CallCounter;

static int counter_init(CallCounter *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    self->micro_step_index = self->latest = -1;
    return 0;
}

static void begin_micro_step(CallCounter *self, long long micro_step_index) {
    if (self->micro_step_index != micro_step_index) {
        self->micro_step_index = micro_step_index;
        self->next = 0;
        self->latest = -1;
    }
}

static PyObject *counter_begin(CallCounter *self, PyObject *micro_step_index) {
    const long long number = PyLong_AsLongLong(micro_step_index);
    if (PyErr_Occurred())
        return NULL;
    begin_micro_step(self, number);
    Py_RETURN_NONE;
}

static PyObject *counter_take(CallCounter *self, PyObject *args) {
    (void)args;
    return PyLong_FromLongLong(self->next++);
}

static int is_open_here(const CallCounter *self) { return self->is_open && self->thread == PyThread_get_thread_ident(); }

static PyObject *counter_pop(CallCounter *self, PyObject *args) {
    (void)args;
    if (!is_open_here(self))
        Py_RETURN_NONE;
    self->is_open = 0;
    return PyLong_FromLongLong(self->open_index);
}

static PyMethodDef counter_methods[] = {
    {"begin", (PyCFunction)counter_begin, METH_O, "begin(micro-step) -> None"},
    {"take", (PyCFunction)counter_take, METH_NOARGS, "take() -> int"},
    {"pop", (PyCFunction)counter_pop, METH_NOARGS, "pop() -> int or None"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef counter_members[] = {
    {"micro_step_index", T_LONGLONG, offsetof(CallCounter, micro_step_index), READONLY, NULL},
    {"latest", T_LONGLONG, offsetof(CallCounter, latest), 0, NULL},
    {"is_open", T_BOOL, offsetof(CallCounter, is_open), READONLY, NULL},
    {"open_micro_step", T_LONGLONG, offsetof(CallCounter, open_micro_step), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot counter_slots[] = {
    {Py_tp_doc, "The indices of a module's calls."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, counter_init},
    {Py_tp_methods, counter_methods},
    {Py_tp_members, counter_members},
    {0, NULL},
};

static PyType_Spec counter_spec = {
    "instrument.stats.native.CallCounter", sizeof(CallCounter), 0, Py_TPFLAGS_DEFAULT, counter_slots};

/* ---------------------------------------------------------------------------------------------------------------- recordings */

typedef struct {
    PyObject_HEAD PyObject *slab, *counts, *clock, *slots, *module, *last_path, *last_firing;
    PyTypeObject *class;  /* of the module, whose slots `known` has */
    PyTypeObject *last_class;
    long long last_slot;  /* of the last path, firing and class; they are most often the same objects in the next step */
    long long *known;     /* the slots of the output of each call and its first gradient; -1 for those that are unknown */
    Py_ssize_t known_count;
    int with_magnitudes, at_boundary, in_recomputation;
} Recording;

HOLDER(recording, 7)

static PyTypeObject *counts_type, *counter_type, *recording_type, *gradient_type;

static PyObject *allocated(PyTypeObject *class) { return ((allocfunc)PyType_GetSlot(class, Py_tp_alloc))(class, 0); }

static PyObject *recording_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *slab, *counts, *clock, *slots, *module;
    int with_magnitudes, at_boundary, in_recomputation;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!OOOppp", slab_type, &slab, counts_type, &counts, &clock, &slots, &module,
                          &with_magnitudes, &at_boundary, &in_recomputation))
        return NULL;
    Recording *self = (Recording *)allocated(class);
    if (!self)
        return NULL;
    self->with_magnitudes = with_magnitudes;
    self->at_boundary = at_boundary;
    self->in_recomputation = in_recomputation;
    self->slab = Py_NewRef(slab);
    self->counts = Py_NewRef(counts);
    self->clock = Py_NewRef(clock);
    self->slots = Py_NewRef(slots);
    self->module = Py_NewRef(module);
    return (PyObject *)self;
}

static void recording_dealloc(Recording *self) {
    PyMem_Free(self->known);
    release((PyObject *)self, recording_clear);
}

/* 1 if a row was added, 0 if the tensor is not plain, -1 with an exception set. */
static int record(Recording *self, PyObject *tensor, long long slot) {
    PyObject *moment = PyObject_GetAttr(self->clock, self->at_boundary ? name_boundary : name_moment);
    const int added = moment ? add_to_slab(self->slab, tensor, slot, moment, self->with_magnitudes) : -1;
    Py_XDECREF(moment);
    return added;
}

/* Returns the slot of a path and a firing; -1 with an exception set. */
static long long slot_of(Recording *self, PyObject *path, PyObject *firing) {
    PyObject *key = firing ? PyTuple_Pack(3, path, firing, Py_TYPE(self->module)) : NULL;
    PyObject *slot = key ? PyObject_GetItem(self->slots, key) : NULL;
    const long long number = slot ? PyLong_AsLongLong(slot) : -1;
    Py_XDECREF(key);
    Py_XDECREF(slot);
    return number;
}

/* Records the output of a call, or its first gradient; see `record`. */
static int record_call(Recording *self, PyObject *tensor, long long index) {
    if (self->class != Py_TYPE(self->module) || index >= self->known_count) {
        const Py_ssize_t count = index < self->known_count ? self->known_count : 2 * (Py_ssize_t)index + 1;
        long long *known = PyMem_Realloc(self->known, (size_t)count * sizeof *known);
        if (!known) {
            PyErr_NoMemory();
            return -1;
        }
        const Py_ssize_t kept = self->class == Py_TYPE(self->module) ? self->known_count : 0;
        for (Py_ssize_t i = kept; i < count; i++)
            known[i] = -1;
        self->class = Py_TYPE(self->module);
        self->known = known;
        self->known_count = count;
    }
    long long slot = self->known[index];
    if (slot < 0) {
        PyObject *firing = PyObject_CallFunction(functions[FIRING], "LiOL", index, 0, Py_False, index);
        slot = slot_of(self, no_path, firing);
        Py_XDECREF(firing);
        if (slot < 0)
            return -1;
        if (index < self->known_count) /* the call may have run other threads */
            self->known[index] = slot;
    }
    return record(self, tensor, slot);
}

static PyObject *recording_call(Recording *self, PyObject *args, PyObject *kwargs) {
    PyObject *tensor, *path, *firing;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO", &tensor, &path, &firing))
        return NULL;
    const int is_recorded = self->in_recomputation ? 1 : attribute_is(firing, name_recompute, Py_False);
    if (is_recorded < 0)
        return NULL;
    if (!is_recorded)
        Py_RETURN_NONE;
    long long slot = self->last_slot;
    if (path != self->last_path || firing != self->last_firing || self->last_class != Py_TYPE(self->module)) {
        slot = slot_of(self, path, firing);
        if (slot < 0)
            return NULL;
        PyObject *old_path = self->last_path, *old_firing = self->last_firing;
        self->last_path = Py_NewRef(path);
        self->last_firing = Py_NewRef(firing);
        self->last_class = Py_TYPE(self->module);
        self->last_slot = slot;
        Py_XDECREF(old_path);
        Py_XDECREF(old_firing);
    }
    const int added = record(self, tensor, slot);
    return added < 0 ? NULL : Py_NewRef(added ? tensor : Py_None);
}

static PyType_Slot recording_slots[] = {
    {Py_tp_doc, "What a site does that records statistics of plain tensors."},
    {Py_tp_new, recording_new},
    {Py_tp_call, recording_call},
    {Py_tp_traverse, recording_traverse},
    {Py_tp_clear, recording_clear},
    {Py_tp_dealloc, recording_dealloc},
    {0, NULL},
};

static PyType_Spec recording_spec = {"instrument.stats.native.Recording", sizeof(Recording), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, recording_slots};

/* ---------------------------------------------------------------------------------------------------------------- calls */

typedef struct {
    PyObject_HEAD PyObject *clock, *counter, *outputs, *gradients, *finish;
} PlainCalls;

HOLDER(calls, 5)

/* The hook of the gradient of one output. It refers to no tensor, so that the graph that holds it can be freed. */
typedef struct {
    PyObject_HEAD PyObject *calls;
    long long index, backward;
} Gradient;

HOLDER(gradient, 1)

static int are_recordings(PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        if (Py_TYPE(PyTuple_GetItem(tuple, i)) != recording_type)
            return 0;
    return 1;
}

static PyObject *calls_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *clock, *counter, *outputs, *gradients, *finish;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!O!O!O", &clock, counter_type, &counter, &PyTuple_Type, &outputs, &PyTuple_Type,
                          &gradients, &finish))
        return NULL;
    if (!are_recordings(outputs) || !are_recordings(gradients) || !functions[0]) {
        PyErr_SetString(PyExc_TypeError, "outputs and gradients have to be recordings, after connect_torch");
        return NULL;
    }
    PlainCalls *self = (PlainCalls *)allocated(class);
    if (!self)
        return NULL;
    self->clock = Py_NewRef(clock);
    self->counter = Py_NewRef(counter);
    self->outputs = Py_NewRef(outputs);
    self->gradients = Py_NewRef(gradients);
    self->finish = Py_NewRef(finish);
    return (PyObject *)self;
}

static void calls_dealloc(PyObject *self) { release(self, calls_clear); }

/* Whether hooks do nothing now: the clock is closed, or a transform of torch.func runs the code. -1 with an exception set. */
static int is_inactive(const PlainCalls *self) {
    const int is_open = attribute_is(self->clock, name_closed, Py_False);
    const int is_untransformed = is_open == 1 ? is_object(PyObject_CallNoArgs(functions[TRANSFORM]), Py_None) : is_open;
    return is_untransformed < 0 ? -1 : !is_untransformed;
}

/* Whether this thread computes a forward pass with gradients, without hooks on saved tensors. -1 with an exception set. */
static int is_plain_pass(void) {
    int is_plain = is_object(PyObject_CallNoArgs(functions[GRAD_ENABLED]), Py_True);
    if (is_plain != 1)
        return is_plain;
    PyObject *pass = PyObject_CallNoArgs(functions[BACKWARD_PASS]);
    is_plain = pass ? PyObject_RichCompareBool(pass, minus_one, Py_EQ) : -1;
    Py_XDECREF(pass);
    if (is_plain != 1)
        return is_plain;
    return is_object(PyObject_CallFunctionObjArgs(functions[PACKING_HOOKS], Py_True, NULL), Py_None);
}

static PyObject *calls_enter(PlainCalls *self, PyObject *args) {
    CallCounter *counter = (CallCounter *)self->counter;
    (void)args;
    const int inactive = is_inactive(self), plain = inactive ? 0 : is_plain_pass();
    if (inactive < 0 || plain < 0)
        return NULL;
    if (!plain)
        Py_RETURN_FALSE;
    PyObject *number = PyObject_GetAttr(self->clock, name_micro_step_index);
    const long long micro_step_index = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return NULL;
    /* A call of this thread from an earlier micro-step was ended by an exception. */
    if (counter->is_open && (counter->open_micro_step == micro_step_index || !is_open_here(counter)))
        Py_RETURN_FALSE;
    begin_micro_step(counter, micro_step_index);
    counter->open_index = counter->latest = counter->next++;
    counter->open_micro_step = micro_step_index;
    counter->thread = PyThread_get_thread_ident();
    counter->is_open = 1;
    Py_RETURN_TRUE;
}

/* Registers an object as a hook of a tensor, as `Tensor.register_hook` does, but without a handle. The numbers of handles are not
   negative. */
static int add_hook(PyObject *tensor, PyObject *node, PyObject *hook) {
    static long long number;
    PyObject *hooks = PyObject_GetAttr(tensor, name__backward_hooks), *registered = NULL;
    if (hooks == Py_None) {
        Py_DECREF(hooks);
        hooks = PyObject_CallNoArgs(functions[ORDERED_DICT]);
        if (hooks && !PyObject_SetAttr(tensor, name__backward_hooks, hooks))
            registered = PyObject_CallMethodObjArgs(node, name__register_hook_dict, tensor, NULL);
        if (!registered)
            Py_CLEAR(hooks);
        Py_XDECREF(registered);
    }
    PyObject *key = hooks ? PyLong_FromLongLong(--number) : NULL;
    const int result = key ? PyObject_SetItem(hooks, key, hook) : -1;
    Py_XDECREF(hooks);
    Py_XDECREF(key);
    return result;
}

/* Registers the hook of the gradient. 0 if Python code has to do it: the tensor is a leaf, a view or not plain. -1 with an exception
   set. */
static int register_gradient(PlainCalls *self, PyObject *output, long long index) {
    int is_plain = is_plain_tensor(output) ? attribute_is(output, name_requires_grad, Py_True) : 0;
    if (is_plain == 1)
        is_plain = is_object(PyObject_CallNoArgs(functions[GRAD_ENABLED]), Py_True);
    if (is_plain == 1)
        is_plain = attribute_is(output, name__base, Py_None);
    if (is_plain != 1)
        return is_plain;
    PyObject *node = PyObject_GetAttr(output, name_grad_fn);
    if (!node || node == Py_None) {
        const int result = node ? 0 : -1;
        Py_XDECREF(node);
        return result;
    }
    Gradient *hook = (Gradient *)allocated(gradient_type);
    if (hook) {
        hook->calls = Py_NewRef((PyObject *)self);
        hook->index = index;
    }
    const int result = hook ? add_hook(output, node, (PyObject *)hook) : -1;
    Py_DECREF(node);
    Py_XDECREF((PyObject *)hook);
    return result < 0 ? -1 : 1;
}

static PyObject *calls_leave(PlainCalls *self, PyObject *output) {
    CallCounter *counter = (CallCounter *)self->counter;
    const int inactive = is_inactive(self);
    if (inactive < 0)
        return NULL;
    if (inactive || !is_open_here(counter))
        return PyLong_FromLong(0);
    const Py_ssize_t outputs = PyTuple_Size(self->outputs), gradients = PyTuple_Size(self->gradients);
    const long long index = counter->open_index;
    Py_ssize_t done = 0;
    int result = 1;
    for (; done < outputs; done++) {
        Recording *recording = (Recording *)PyTuple_GetItem(self->outputs, done);
        result = record_call(recording, output, index);
        if (result != 1)
            break;
        ((Counts *)recording->counts)->opportunities++;
        ((Counts *)recording->counts)->firings++;
    }
    if (result == 1 && gradients)
        result = register_gradient(self, output, index);
    if (result < 0)
        return NULL;
    if (!result)
        return PyLong_FromSsize_t(done);
    for (Py_ssize_t i = 0; i < gradients; i++)
        ((Counts *)((Recording *)PyTuple_GetItem(self->gradients, i))->counts)->opportunities++;
    counter->is_open = 0;
    return PyLong_FromLong(-1);
}

static PyMethodDef calls_methods[] = {
    {"enter", (PyCFunction)calls_enter, METH_NOARGS, "enter() -> bool"},
    {"leave", (PyCFunction)calls_leave, METH_O, "leave(output) -> int"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "What hooks do with a call that needs no Python code."},
    {Py_tp_new, calls_new},
    {Py_tp_methods, calls_methods},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_dealloc, calls_dealloc},
    {0, NULL},
};

static PyType_Spec calls_spec = {"instrument.stats.native.PlainCalls", sizeof(PlainCalls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots};

/* ---------------------------------------------------------------------------------------------------------------- gradients */

static void gradient_dealloc(PyObject *self) { release(self, gradient_clear); }

static PyObject *gradient_call(Gradient *self, PyObject *args, PyObject *kwargs) {
    PyObject *gradient;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &gradient))
        return NULL;
    PlainCalls *calls = (PlainCalls *)self->calls;
    /* The gradient is None if an operation has several outputs and this one is unused. */
    const int is_closed = gradient == Py_None ? 1 : attribute_is(calls->clock, name_closed, Py_True);
    if (is_closed < 0)
        return NULL;
    if (is_closed)
        Py_RETURN_NONE;
    const long long backward = self->backward++;
    const Py_ssize_t count = PyTuple_Size(calls->gradients);
    Py_ssize_t done = 0;
    for (; !backward && done < count; done++) {
        Recording *recording = (Recording *)PyTuple_GetItem(calls->gradients, done);
        const int result = record_call(recording, gradient, self->index);
        if (result < 0)
            return NULL;
        if (!result)
            break;
        ((Counts *)recording->counts)->firings++;
    }
    if (done == count)
        Py_RETURN_NONE;
    return PyObject_CallFunction(calls->finish, "nLLO", done, self->index, backward, gradient);
}

static PyType_Slot gradient_slots[] = {
    {Py_tp_doc, "The hook of the gradient of one output."},
    {Py_tp_call, gradient_call},
    {Py_tp_traverse, gradient_traverse},
    {Py_tp_clear, gradient_clear},
    {Py_tp_dealloc, gradient_dealloc},
    {0, NULL},
};

static PyType_Spec gradient_spec = {"instrument.stats.native.Gradient", sizeof(Gradient), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                    gradient_slots};

/* ---------------------------------------------------------------------------------------------------------------- module */

static PyMethodDef connect_method = {"connect_torch", connect_torch, METH_VARARGS,
                                     "connect_torch(transform, backward pass, is grad enabled, packing hooks, ordered dict, firing) "
                                     "-> None"};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    return type && !PyModule_AddObjectRef(module, name, type) ? (PyTypeObject *)type : NULL;
}

int add_plain_calls(PyObject *module) {
#define INTERN(NAME) name_##NAME = PyUnicode_InternFromString(#NAME);
    NAMES(INTERN)
    no_path = PyUnicode_InternFromString("");
    minus_one = PyLong_FromLong(-1);
    PyObject *connect = PyCFunction_New(&connect_method, NULL);
    if (!connect || PyModule_AddObjectRef(module, connect_method.ml_name, connect))
        return -1;
    Py_DECREF(connect);
    counts_type = add_type(module, "Counts", &counts_spec);
    counter_type = add_type(module, "CallCounter", &counter_spec);
    recording_type = add_type(module, "Recording", &recording_spec);
    gradient_type = add_type(module, "Gradient", &gradient_spec);
    PyTypeObject *calls_type = add_type(module, "PlainCalls", &calls_spec);
    return counts_type && counter_type && recording_type && gradient_type && calls_type && !PyErr_Occurred() ? 0 : -1;
}
