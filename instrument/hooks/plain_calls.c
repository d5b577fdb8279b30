/* Runs the hooks of a module in C, if each of them acts on its output, which is one plain tensor, or records statistics of the gradient
   of that output, or of the results of functions. `instrument.hooks.module_hooks.ModuleHooks` creates a `PlainCalls` when schedules change, and handles all other calls in
   Python. Plain tensors are those of `Slab.add`.

   connect_torch(transform, is tracing, graph task, is grad enabled, packing hooks, ordered dict, firing, register at base, compiler, modes,
   mode at, push mode, pop mode, code)

   Sets what this code calls or compares: transform() returns the active transform of torch.func or None, is tracing() a bool, graph task() the number of the backward
   pass of this thread or -1, is grad enabled() a bool, packing hooks(True) the innermost hooks on saved tensors or None; the class
   of the dictionary of a tensor's hooks; firing(call, backward, recompute, origin), which returns a `FiringIndex`; and
   register at base(view, hook), which registers the hook for the case that the view is modified in place; compiler(), which returns
   None if torch.compile does not run this code; modes(), mode at(index), push mode(mode) and pop mode() of the stack of TorchFunctionModes;
   and the code object of `Module._call_impl`.

   FiringCounts: the attributes `opportunities`, `firings`, `expected`, `fired` and `has_notes` of `HookCoverage`.

   update_counts(counts) -> list: for each of the counts in a list that has no notes and at least as many firings as opportunities, of
   which there are any, adds both to the counts of all micro-steps, and starts at 0 again. Returns the others.

   CallIndices: the index of the next call of a module, and the open call: one that `PlainCalls.enter` began and that has not ended.

   micro_step_index: the micro-step of the latest call. latest: the index of the latest call outside of checkpoint segments; -1 for
   none. is_open: whether a call is open. open_micro_step: the micro-step in which it began. failed_micro_step: the latest one in which a
   hook ended a call with an exception; -1 for none.
   start_micro_step(micro-step): in another micro-step than before, indices start at 0 again.
   next_index() -> int: returns the next index.
   end_open_call() -> int or None: ends the open call, and returns its index. None if there is none, or if it belongs to another thread.

   Recording(slab, counts, clock, slots, module, further, at_boundary, records_recomputation)

   Called with a tensor, its path and the firing, it adds a row with the statistics of the tensor. It returns the tensor. It returns None
   if the tensor is not plain, or if the pass is recomputed and `records_recomputation` is false. `slots` has the slots of the rows, with
   a key (path, firing, class of the module).

   Changing(slab, counts, clock, slots, module, further, at_boundary, changes_recomputation, change, finish, held)

   Called like a `Recording`, it returns what replaces the tensor, and adds a row with the effect. change(tensor, path, moment) returns what
   replaces the tensor, and the factor or None; None if the tensor is not plain. finish(tensor, new, factor, slot, path, firing) adds the row
   if the slab cannot, which is None if processes merge its rows, or if the factor is no ordinary number.

   PlainCalls(clock, indices, outputs, counts, gradients, finish)

   `outputs` is a tuple of recordings, of changes, and of functions of the output, its path and the firing that return what replaces it, or None if it
   is not plain. `counts` has the counts of each. `gradients` is a tuple of recordings. `finish(done, call, backward, gradient)` is called
   for the recordings of a gradient after the first `done` ones; it returns what the hook of the gradient returns.

   enter() -> bool: begins a call before the module runs. False if hooks are inactive, because the clock is closed, or a transform of
   torch.func or torch.jit.trace runs the module; if the call needs Python code, because it runs in a backward pass, without gradients, or with hooks
   on saved tensors; or if a call is open, in this micro-step or in another thread.
   leave(output) -> what replaces the output, or None: ends the call after the module has run. If Python code is needed, the call stays
   open, and the result is a tuple: the number of those in `outputs` that are done, and the output that they leave. The number is 0 if this
   thread has no open call, or if hooks are inactive. An exception of a hook ends the call.

   FunctionObserver(mode, known, running, codes, observe, finish)

   Called with a function and its arguments, it does what `FunctionMode.observe` does. The other arguments are attributes of the mode.
   `finish(function, name, owners, args, kwargs, result)` is called for the owners that cannot record the result here.

   FunctionCall(frame, observers, leaf hooks, call, firing): the attributes of `HookedModule`, its subclass, which `class` is below. The
   attribute `given_call` is None if `FunctionCalls.enter` began the call.

   FunctionCalls(clock, indices, is shared, threads, calls, class, observers, leaf hooks)

   enter(group, args) and leave(group) do what `FunctionHooks.enter` and `FunctionHooks.leave` do, and return True. They return False, and
   do nothing, if Python code is needed. */

#include "../stats/native.h"
#include <structmember.h>

enum {
    TRANSFORM, TRACING, GRAPH_TASK, GRAD_ENABLED, PACKING_HOOKS, ORDERED_DICT, FIRING, REGISTER_AT_BASE,
    COMPILER, MODES, MODE_AT, PUSH_MODE, POP_MODE, CODE, FUNCTIONS
};
static PyObject *functions[FUNCTIONS];

#define NAMES(NAME)                                                                                                   \
    NAME(closed) NAME(micro_step_index) NAME(moment) NAME(boundary) NAME(requires_grad) NAME(grad_fn) NAME(_base)     \
        NAME(_backward_hooks) NAME(_register_hook_dict) NAME(recompute) NAME(mode) NAME(observe) NAME(is_active)          \
        NAME(knows_compiler) NAME(f_back) NAME(frame) NAME(firing)      \
        NAME(direct) NAME(update_coverage) NAME(enter) NAME(leave)
#define DECLARE(NAME) static PyObject *name_##NAME;
NAMES(DECLARE)

static PyObject *no_path, *minus_one, *compiler_module;
static PyTypeObject *counts_type, *indices_type, *recording_type, *changing_type, *gradient_type, *observer_type, *function_call_type;

static PyObject *connect_torch(PyObject *self, PyObject *args) {
    (void)self;
    if (PyTuple_Size(args) != FUNCTIONS)
        return PyErr_Format(PyExc_TypeError, "connect_torch takes %d arguments", FUNCTIONS);
    for (int i = 0; i < FUNCTIONS; i++) {
        PyObject *old = functions[i];
        functions[i] = Py_NewRef(PyTuple_GetItem(args, i));
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

/* Whether an object is the expected one. -1 if it is NULL, with the exception set. Steals the reference. */
static int is_object(PyObject *object, PyObject *expected) {
    Py_XDECREF(object);
    return object ? object == expected : -1;
}

static int attribute_is(PyObject *object, PyObject *name, PyObject *expected) {
    return is_object(PyObject_GetAttr(object, name), expected);
}

/* What the types that the garbage collector traverses have in common: their first COUNT fields are references. */
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
    }                                                                                                                 \
    static void TYPE##_dealloc(PyObject *self) {                                                                      \
        PyTypeObject *class = Py_TYPE(self);                                                                          \
        PyObject_GC_UnTrack(self);                                                                                    \
        TYPE##_clear(self);                                                                                           \
        ((freefunc)PyType_GetSlot(class, Py_tp_free))(self);                                                          \
        Py_DECREF(class);                                                                                             \
    }

/* Defines the specification of a type with the functions of `HOLDER`. The last arguments are its other slots. */
#define HOLDER_TYPE(TYPE, STRUCT, FLAGS, DOCUMENTATION, DEALLOC, ...)                                                 \
    static PyType_Slot TYPE##_slots[] = {                                                                             \
        {Py_tp_doc, DOCUMENTATION}, {Py_tp_traverse, TYPE##_traverse}, {Py_tp_clear, TYPE##_clear},                   \
        {Py_tp_dealloc, DEALLOC}, __VA_ARGS__, {0, NULL},                                                             \
    };                                                                                                                \
    static PyType_Spec TYPE##_spec = {"instrument.stats.native." #STRUCT, sizeof(STRUCT), 0,                          \
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | (FLAGS), TYPE##_slots};

/* Returns a new object with these first references; NULL with an exception set. */
static PyObject *new_holder(PyTypeObject *class, PyObject *const *references, int count) {
    Holder *self = (Holder *)((allocfunc)PyType_GetSlot(class, Py_tp_alloc))(class, 0);
    for (int i = 0; self && i < count; i++)
        self->references[i] = Py_NewRef(references[i]);
    return (PyObject *)self;
}

/* ---------------------------------------------------------------------------------------------------------------- counts */

typedef struct {
    PyObject_HEAD long long opportunities, firings, expected, fired;
    char has_notes;
} FiringCounts;

static PyMemberDef counts_members[] = {
    {"opportunities", T_LONGLONG, offsetof(FiringCounts, opportunities), 0, NULL},
    {"firings", T_LONGLONG, offsetof(FiringCounts, firings), 0, NULL},
    {"expected", T_LONGLONG, offsetof(FiringCounts, expected), 0, NULL},
    {"fired", T_LONGLONG, offsetof(FiringCounts, fired), 0, NULL},
    {"has_notes", T_BOOL, offsetof(FiringCounts, has_notes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot counts_slots[] = {
    {Py_tp_doc, "The opportunities and firings of a site, in the current micro-step and in all earlier ones."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, counts_members},
    {0, NULL},
};

static PyType_Spec counts_spec = {
    "instrument.stats.native.FiringCounts", sizeof(FiringCounts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, counts_slots};

static PyObject *update_counts(PyObject *self, PyObject *list) {
    (void)self;
    PyObject *others = PyList_Check(list) ? PyList_New(0) : PyErr_Format(PyExc_TypeError, "update_counts takes a list");
    for (Py_ssize_t i = 0; others && i < PyList_Size(list); i++) {
        FiringCounts *counts = (FiringCounts *)PyList_GetItem(list, i);
        if (!PyObject_TypeCheck((PyObject *)counts, counts_type)) {
            PyErr_SetString(PyExc_TypeError, "update_counts takes a list of FiringCounts");
            Py_CLEAR(others);
        } else if (counts->has_notes || counts->opportunities < 1 || counts->firings < counts->opportunities) {
            if (PyList_Append(others, (PyObject *)counts))
                Py_CLEAR(others);
        } else {
            counts->expected += counts->opportunities;
            counts->fired += counts->firings;
            counts->opportunities = counts->firings = 0;
        }
    }
    return others;
}

/* ---------------------------------------------------------------------------------------------------------------- indices of calls */

typedef struct {
    PyObject_HEAD long long micro_step_index, next, latest, open_index, open_micro_step, failed_micro_step;
    unsigned long thread; /* of the open call */
    char is_open;
} CallIndices;

static int indices_init(CallIndices *self, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    self->micro_step_index = self->latest = self->failed_micro_step = -1;
    return 0;
}

static void start_micro_step(CallIndices *self, long long micro_step_index) {
    if (self->micro_step_index != micro_step_index) {
        self->micro_step_index = micro_step_index;
        self->next = 0;
        self->latest = -1;
    }
}

static PyObject *indices_start_micro_step(CallIndices *self, PyObject *micro_step_index) {
    const long long number = PyLong_AsLongLong(micro_step_index);
    if (PyErr_Occurred())
        return NULL;
    start_micro_step(self, number);
    Py_RETURN_NONE;
}

static PyObject *indices_next(CallIndices *self, PyObject *args) {
    (void)args;
    return PyLong_FromLongLong(self->next++);
}

static int is_open_here(const CallIndices *self) { return self->is_open && self->thread == PyThread_get_thread_ident(); }

static PyObject *indices_end_open_call(CallIndices *self, PyObject *args) {
    (void)args;
    if (!is_open_here(self))
        Py_RETURN_NONE;
    self->is_open = 0;
    return PyLong_FromLongLong(self->open_index);
}

static PyMethodDef indices_methods[] = {
    {"start_micro_step", (PyCFunction)indices_start_micro_step, METH_O, "start_micro_step(micro-step) -> None"},
    {"next_index", (PyCFunction)indices_next, METH_NOARGS, "next_index() -> int"},
    {"end_open_call", (PyCFunction)indices_end_open_call, METH_NOARGS, "end_open_call() -> int or None"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef indices_members[] = {
    {"micro_step_index", T_LONGLONG, offsetof(CallIndices, micro_step_index), READONLY, NULL},
    {"latest", T_LONGLONG, offsetof(CallIndices, latest), 0, NULL},
    {"is_open", T_BOOL, offsetof(CallIndices, is_open), READONLY, NULL},
    {"open_micro_step", T_LONGLONG, offsetof(CallIndices, open_micro_step), READONLY, NULL},
    {"failed_micro_step", T_LONGLONG, offsetof(CallIndices, failed_micro_step), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot indices_slots[] = {
    {Py_tp_doc, "The index of the next call of a module, and the call that PlainCalls.enter began."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, indices_init},
    {Py_tp_methods, indices_methods},
    {Py_tp_members, indices_members},
    {0, NULL},
};

static PyType_Spec indices_spec = {
    "instrument.stats.native.CallIndices", sizeof(CallIndices), 0, Py_TPFLAGS_DEFAULT, indices_slots};

/* ---------------------------------------------------------------------------------------------------------------- recordings */

typedef struct { /* also a Changing */
    PyObject_HEAD PyObject *slab, *counts, *clock, *slots, *module, *change, *finish, *last_path, *last_firing;
    PyTypeObject *class;  /* of the module, for which `slots_by_call` is valid */
    PyTypeObject *last_class;
    long long last_slot;  /* of the last path, firing and class; they are most often the same objects in the next step */
    long long *slots_by_call; /* the slot of the output of each call, or of its first gradient; -1 if it was not looked up yet */
    Py_ssize_t slots_by_call_length;
    double held;
    int further, at_boundary, records_recomputation;
} Recording;

HOLDER(recording, 9)

static PyObject *recording_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *given[7] = {NULL}, *held = Py_None; /* slab, counts, clock, slots, module, change, finish */
    int further, at_boundary, records_recomputation;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!OOOipp|OOO", &given[0], counts_type, &given[1], &given[2], &given[3], &given[4], &further,
                          &at_boundary, &records_recomputation, &given[5], &given[6], &held))
        return NULL;
    const int is_change = class == changing_type;
    if (is_change != (given[6] != NULL) || (Py_TYPE(given[0]) != slab_type && !(is_change && given[0] == Py_None)))
        return PyErr_Format(PyExc_TypeError, "expected a Slab, or None for a change, and the functions of a change only");
    const double number = number_or_nan(held);
    Recording *self = PyErr_Occurred() ? NULL : (Recording *)new_holder(class, given, is_change ? 7 : 5);
    if (self) {
        self->held = number;
        self->further = further;
        self->at_boundary = at_boundary;
        self->records_recomputation = records_recomputation;
    }
    return (PyObject *)self;
}

static void recording_free(Recording *self) {
    PyMem_Free(self->slots_by_call);
    recording_dealloc((PyObject *)self);
}

/* 1 if a row was added, 0 if the tensor is not plain, -1 with an exception set. */
static int record(Recording *self, PyObject *tensor, long long slot) {
    PyObject *moment = PyObject_GetAttr(self->clock, self->at_boundary ? name_boundary : name_moment);
    const int added = moment ? add_to_slab(self->slab, tensor, slot, moment, self->further) : -1;
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

static PyObject *firing_of_call(long long index) {
    return PyObject_CallFunction(functions[FIRING], "LiOL", index, 0, Py_False, index);
}

/* Returns the slot of the output of a call, or of its first gradient; -1 with an exception set. */
static long long slot_of_index(Recording *self, long long index) {
    if (self->class != Py_TYPE(self->module) || index >= self->slots_by_call_length) {
        const Py_ssize_t count = index < self->slots_by_call_length ? self->slots_by_call_length : 2 * (Py_ssize_t)index + 1;
        long long *slots_by_call = PyMem_Realloc(self->slots_by_call, (size_t)count * sizeof *slots_by_call);
        if (!slots_by_call) {
            PyErr_NoMemory();
            return -1;
        }
        const Py_ssize_t kept = self->class == Py_TYPE(self->module) ? self->slots_by_call_length : 0;
        for (Py_ssize_t i = kept; i < count; i++)
            slots_by_call[i] = -1;
        self->class = Py_TYPE(self->module);
        self->slots_by_call = slots_by_call;
        self->slots_by_call_length = count;
    }
    long long slot = self->slots_by_call[index];
    if (slot < 0) {
        PyObject *firing = firing_of_call(index);
        slot = slot_of(self, no_path, firing);
        Py_XDECREF(firing);
        if (slot < 0)
            return -1;
        if (self->class == Py_TYPE(self->module)) /* `slot_of` runs Python code, and with it other threads */
            self->slots_by_call[index] = slot;
    }
    return slot;
}

/* Returns the slot of a tensor at a path; -1 with an exception set. */
static long long slot_at(Recording *self, PyObject *path, PyObject *firing) {
    long long slot = self->last_slot;
    if (path != self->last_path || firing != self->last_firing || self->last_class != Py_TYPE(self->module)) {
        slot = slot_of(self, path, firing);
        if (slot < 0)
            return -1;
        PyObject *old_path = self->last_path, *old_firing = self->last_firing;
        self->last_path = Py_NewRef(path);
        self->last_firing = Py_NewRef(firing);
        self->last_class = Py_TYPE(self->module);
        self->last_slot = slot;
        Py_XDECREF(old_path);
        Py_XDECREF(old_firing);
    }
    return slot;
}

/* Records the output of a call, or its first gradient; see `record`. */
static int record_call(Recording *self, PyObject *tensor, long long index) {
    const long long slot = slot_of_index(self, index);
    return slot < 0 ? -1 : record(self, tensor, slot);
}

/* Records a tensor at a path; see `record`. */
static int record_at(Recording *self, PyObject *tensor, PyObject *path, PyObject *firing) {
    const long long slot = slot_at(self, path, firing);
    return slot < 0 ? -1 : record(self, tensor, slot);
}

/* Returns what replaces a tensor, and adds a row with the effect; None if the tensor is not plain. `firing` is NULL for that of a call. */
static PyObject *change_tensor(Recording *self, PyObject *tensor, long long slot, PyObject *path, PyObject *firing, long long index) {
    PyObject *moment = slot < 0 ? NULL : PyObject_GetAttr(self->clock, name_moment), *new = NULL, *factor = NULL;
    PyObject *changed = moment ? PyObject_CallFunctionObjArgs(self->change, tensor, path, moment, NULL) : NULL;
    if (changed && changed != Py_None && PyArg_ParseTuple(changed, "OO", &new, &factor)) {
        const double number = factor == Py_None || PyFloat_Check(factor) ? number_or_nan(factor) : NAN;
        const int is_simple = self->slab != Py_None && (factor == Py_None || number == number);
        const int added = is_simple ? add_effect_to_slab(self->slab, tensor, new, slot, moment, number, self->held) : 0;
        PyObject *own = added ? NULL : firing ? Py_NewRef(firing) : firing_of_call(index);
        if (own)
            Py_XDECREF(PyObject_CallFunction(self->finish, "OOOLOO", tensor, new, factor, slot, path, own));
        Py_XDECREF(own);
    }
    PyObject *result = PyErr_Occurred() ? NULL : Py_NewRef(new ? new : Py_None);
    Py_XDECREF(changed);
    Py_XDECREF(moment);
    return result;
}

static PyObject *recording_call(Recording *self, PyObject *args, PyObject *kwargs) {
    PyObject *tensor, *path, *firing;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO", &tensor, &path, &firing))
        return NULL;
    const int is_recorded = self->records_recomputation ? 1 : attribute_is(firing, name_recompute, Py_False);
    if (is_recorded < 0)
        return NULL;
    if (!is_recorded)
        Py_RETURN_NONE;
    if (self->change)
        return change_tensor(self, tensor, slot_at(self, path, firing), path, firing, 0);
    const int added = record_at(self, tensor, path, firing);
    return added < 0 ? NULL : Py_NewRef(added ? tensor : Py_None);
}

HOLDER_TYPE(recording, Recording, 0, "Adds a row with the statistics of a plain tensor, or with the effect of its change.", recording_free,
            {Py_tp_new, recording_new}, {Py_tp_call, recording_call})

static PyType_Spec changing_spec = {"instrument.stats.native.Changing", sizeof(Recording), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, recording_slots};

/* ---------------------------------------------------------------------------------------------------------------- calls */

typedef struct {
    PyObject_HEAD PyObject *clock, *indices, *outputs, *counts, *gradients, *finish;
} PlainCalls;

HOLDER(calls, 6)

/* The hook of the gradient of one output. It refers to no tensor, so that the graph that holds it can be freed. */
typedef struct {
    PyObject_HEAD PyObject *calls;
    PyObject *passes; /* a set: the backward passes in which it ran, if it is also registered at the base of a view */
    long long index, backward;
} OutputGradientHook;

HOLDER(gradient, 2)

static int are_all(PyObject *tuple, PyTypeObject *class) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
        if (!PyObject_TypeCheck(PyTuple_GetItem(tuple, i), class))
            return 0;
    return 1;
}

static PyObject *calls_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *given[6]; /* clock, indices, outputs, counts, gradients, finish */
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!O", &given[0], indices_type, &given[1], &PyTuple_Type, &given[2], &PyTuple_Type,
                          &given[3], &PyTuple_Type, &given[4], &given[5]))
        return NULL;
    if (!functions[0])
        return PyErr_Format(PyExc_TypeError, "connect_torch was not called");
    if (PyTuple_Size(given[2]) != PyTuple_Size(given[3]) || !are_all(given[3], counts_type) || !are_all(given[4], recording_type))
        return PyErr_Format(PyExc_TypeError, "outputs need FiringCounts, and gradients must be a tuple of Recording");
    return new_holder(class, given, 6);
}

/* Whether hooks do nothing now: the clock is closed, or a transform of torch.func or torch.jit.trace runs the code. -1 with an exception
   set. */
static int are_hooks_inactive(PyObject *clock) {
    const int is_running = attribute_is(clock, name_closed, Py_False);
    const int is_untransformed = is_running == 1 ? is_object(PyObject_CallNoArgs(functions[TRANSFORM]), Py_None) : is_running;
    const int is_active =
        is_untransformed == 1 ? is_object(PyObject_CallNoArgs(functions[TRACING]), Py_False) : is_untransformed;
    return is_active < 0 ? -1 : !is_active;
}

/* Whether this thread computes a forward pass with gradients, without hooks on saved tensors. -1 with an exception set. */
static int is_plain_pass(void) {
    int is_plain = is_object(PyObject_CallNoArgs(functions[GRAD_ENABLED]), Py_True);
    if (is_plain != 1)
        return is_plain;
    PyObject *pass = PyObject_CallNoArgs(functions[GRAPH_TASK]);
    is_plain = pass ? PyObject_RichCompareBool(pass, minus_one, Py_EQ) : -1;
    Py_XDECREF(pass);
    if (is_plain != 1)
        return is_plain;
    return is_object(PyObject_CallFunctionObjArgs(functions[PACKING_HOOKS], Py_True, NULL), Py_None);
}

/* Begins a call of a module. 1 if it did; 0 if Python code has to do it: see `PlainCalls.enter`. -1 with an exception set. */
static int begin_call(CallIndices *indices, PyObject *clock) {
    const int plain = is_plain_pass();
    if (plain != 1)
        return plain;
    PyObject *number = PyObject_GetAttr(clock, name_micro_step_index);
    const long long micro_step_index = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    if (PyErr_Occurred())
        return -1;
    /* A call of this thread from an earlier micro-step was ended by an exception. */
    if (indices->is_open && (indices->open_micro_step == micro_step_index || !is_open_here(indices)))
        return 0;
    start_micro_step(indices, micro_step_index);
    indices->open_index = indices->latest = indices->next++;
    indices->open_micro_step = micro_step_index;
    indices->thread = PyThread_get_thread_ident();
    indices->is_open = 1;
    return 1;
}

static PyObject *calls_enter(PlainCalls *self, PyObject *args) {
    (void)args;
    const int inactive = are_hooks_inactive(self->clock);
    const int begun = inactive ? -inactive : begin_call((CallIndices *)self->indices, self->clock);
    return inactive < 0 || (!inactive && begun < 0) ? NULL : PyBool_FromLong(begun == 1);
}

/* Registers an object as a hook of a tensor, as `Tensor.register_hook` does, but without a handle. Its keys are negative, because those
   of PyTorch's handles are not. */
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

/* Registers the hook of the gradient, and returns 1. Returns 0 if Python code has to do it: the tensor is a leaf, is not plain, or needs no
   gradient. Returns -1 with an exception set. */
static int register_gradient(PlainCalls *self, PyObject *output, long long index) {
    int is_plain = has_kernel_layout(output) ? attribute_is(output, name_requires_grad, Py_True) : 0;
    if (is_plain == 1)
        is_plain = is_object(PyObject_CallNoArgs(functions[GRAD_ENABLED]), Py_True);
    if (is_plain != 1)
        return PyErr_Occurred() ? -1 : is_plain;
    PyObject *node = PyObject_GetAttr(output, name_grad_fn);
    if (!node || node == Py_None) {
        const int result = node ? 0 : -1;
        Py_XDECREF(node);
        return result;
    }
    OutputGradientHook *hook = (OutputGradientHook *)new_holder(gradient_type, (PyObject *[]){(PyObject *)self}, 1);
    if (hook)
        hook->index = index;
    int result = hook ? add_hook(output, node, (PyObject *)hook) : -1;
    const int has_no_base = result < 0 ? -1 : attribute_is(output, name__base, Py_None);
    if (!has_no_base)
        result = (hook->passes = PySet_New(NULL))
                     ? is_object(PyObject_CallFunctionObjArgs(functions[REGISTER_AT_BASE], output, hook, NULL), Py_None)
                     : -1;
    else if (has_no_base < 0)
        result = -1;
    Py_DECREF(node);
    Py_XDECREF((PyObject *)hook);
    return result < 0 ? -1 : 1;
}

/* Replaces the output of a call by what a function returns for it. 1 if it did, 0 if the output is not plain, -1 with an exception set. */
static int change(PyObject *function, PyObject **output, long long index) {
    Recording *changing = Py_TYPE(function) == changing_type ? (Recording *)function : NULL;
    PyObject *firing = changing ? NULL : firing_of_call(index);
    PyObject *new = changing ? change_tensor(changing, *output, slot_of_index(changing, index), no_path, NULL, index)
                    : firing ? PyObject_CallFunctionObjArgs(function, *output, no_path, firing, NULL)
                             : NULL;
    Py_XDECREF(firing);
    if (!new || new == Py_None) {
        Py_XDECREF(new);
        return new ? 0 : -1;
    }
    Py_DECREF(*output);
    *output = new;
    return 1;
}

static PyObject *calls_leave(PlainCalls *self, PyObject *output) {
    CallIndices *indices = (CallIndices *)self->indices;
    const int inactive = are_hooks_inactive(self->clock);
    if (inactive < 0)
        return NULL;
    if (inactive || !is_open_here(indices))
        return Py_BuildValue("iO", 0, output);
    const Py_ssize_t outputs = PyTuple_Size(self->outputs), gradients = PyTuple_Size(self->gradients);
    const long long index = indices->open_index;
    PyObject *new = Py_NewRef(output), *returned = NULL;
    Py_ssize_t done = 0;
    int result = 1;
    for (; done < outputs; done++) {
        PyObject *hook = PyTuple_GetItem(self->outputs, done);
        FiringCounts *counts = (FiringCounts *)PyTuple_GetItem(self->counts, done);
        result = Py_TYPE(hook) == recording_type ? record_call((Recording *)hook, new, index) : change(hook, &new, index);
        if (result != 1)
            break;
        counts->opportunities++;
        counts->firings++;
    }
    if (result == 1 && gradients)
        result = register_gradient(self, new, index);
    indices->is_open = !result;
    if (result < 0)
        indices->failed_micro_step = indices->open_micro_step;
    if (!result)
        returned = Py_BuildValue("nO", done, new);
    if (result == 1) {
        for (Py_ssize_t i = 0; i < gradients; i++)
            ((FiringCounts *)((Recording *)PyTuple_GetItem(self->gradients, i))->counts)->opportunities++;
        returned = Py_NewRef(new == output ? Py_None : new);
    }
    Py_DECREF(new);
    return returned;
}

static PyMethodDef calls_methods[] = {
    {"enter", (PyCFunction)calls_enter, METH_NOARGS, "enter() -> bool"},
    {"leave", (PyCFunction)calls_leave, METH_O, "leave(output) -> tensor, tuple or None"},
    {NULL, NULL, 0, NULL},
};

HOLDER_TYPE(calls, PlainCalls, 0, "The hooks of a module whose calls need no Python code.", calls_dealloc,
            {Py_tp_new, calls_new}, {Py_tp_methods, calls_methods})

/* ---------------------------------------------------------------------------------------------------------------- gradients */

static PyObject *gradient_call(OutputGradientHook *self, PyObject *args, PyObject *kwargs) {
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
    if (self->passes) {
        PyObject *task = PyObject_CallNoArgs(functions[GRAPH_TASK]);
        const int result = task ? PySet_Add(self->passes, task) : -1;
        Py_XDECREF(task);
        if (result < 0)
            return NULL;
    }
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
        ((FiringCounts *)recording->counts)->firings++;
    }
    if (done == count)
        Py_RETURN_NONE;
    return PyObject_CallFunction(calls->finish, "nLLO", done, self->index, backward, gradient);
}

static PyMemberDef gradient_members[] = {
    {"passes", T_OBJECT, offsetof(OutputGradientHook, passes), READONLY, "The backward passes in which it ran."},
    {NULL, 0, 0, 0, NULL},
};

HOLDER_TYPE(gradient, OutputGradientHook, Py_TPFLAGS_DISALLOW_INSTANTIATION, "The hook of the gradient of one output.", gradient_dealloc,
            {Py_tp_call, gradient_call}, {Py_tp_members, gradient_members})

/* ---------------------------------------------------------------------------------------------------------------- functions */

enum { MAX_OWNERS = 4, MAX_FRAMES = 32 };

typedef struct {
    PyObject_HEAD PyObject *frame, *observers, *leaf_hooks, *given_call, *firing, *counts, *called, *obstacles, *gradients, *compiled,
        *pause_reason;
    char is_paused, has_switched_mode;
} FunctionCall;

HOLDER(function_call, 11)

static PyObject *new_function_call(PyTypeObject *class, PyObject *frame, PyObject *observers, PyObject *leaf_hooks, PyObject *call,
                                   PyObject *firing) {
    PyObject *counts = PyDict_New(), *called = PyDict_New(), *obstacles = PyDict_New(), *gradients = PyDict_New(), *compiled = PyTuple_New(0);
    PyObject *const references[] = {frame,  observers, leaf_hooks, call,     firing, counts,
                                    called, obstacles, gradients,  compiled, Py_None};
    PyObject *self = PyErr_Occurred() ? NULL : new_holder(class, references, 11);
    Py_XDECREF(counts);
    Py_XDECREF(called);
    Py_XDECREF(obstacles);
    Py_XDECREF(gradients);
    Py_XDECREF(compiled);
    return self;
}

static PyObject *function_call_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *frame, *observers, *leaf_hooks, *call, *firing;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!OOO", &frame, &PyDict_Type, &observers, &leaf_hooks, &call, &firing))
        return NULL;
    return new_function_call(class, frame, observers, leaf_hooks, call, firing);
}

#define MEMBER(NAME, FLAGS) {#NAME, T_OBJECT, offsetof(FunctionCall, NAME), FLAGS, NULL}
static PyMemberDef function_call_members[] = {
    MEMBER(frame, READONLY),
    MEMBER(observers, READONLY),
    MEMBER(leaf_hooks, READONLY),
    MEMBER(given_call, 0),
    MEMBER(firing, READONLY),
    MEMBER(counts, READONLY),
    MEMBER(called, READONLY),
    MEMBER(obstacles, READONLY),
    MEMBER(gradients, READONLY),
    MEMBER(compiled, 0),
    MEMBER(pause_reason, 0),
    {"is_paused", T_BOOL, offsetof(FunctionCall, is_paused), READONLY, NULL},
    {"has_switched_mode", T_BOOL, offsetof(FunctionCall, has_switched_mode), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

HOLDER_TYPE(function_call, FunctionCall, Py_TPFLAGS_BASETYPE, "A call of a module whose functions are hooked.", function_call_dealloc,
            {Py_tp_new, function_call_new}, {Py_tp_members, function_call_members})

static FunctionCall *as_function_call(PyObject *object) {
    return PyObject_TypeCheck(object, function_call_type) ? (FunctionCall *)object : NULL;
}

typedef struct {
    PyObject_HEAD PyObject *mode, *known, *running, *codes, *observe, *finish;
} FunctionObserver;

HOLDER(observer, 6)

/* A module call that a function call belongs to, and what records the result. */
typedef struct {
    FunctionCall *running;
    Recording *recording;
    PyObject *path;
} FunctionOwner;

static PyObject *observer_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *given[6]; /* mode, known, running, codes, observe, finish */
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!O!O!OO", &given[0], &PyDict_Type, &given[1], &PyList_Type, &given[2], &PyDict_Type, &given[3],
                          &given[4], &given[5]))
        return NULL;
    return new_holder(class, given, 6);
}

static int is_module_call(PyObject *frame) {
    return is_object((PyObject *)PyFrame_GetCode((PyFrameObject *)frame), functions[CODE]);
}

/* Returns the caller of a frame, whose reference it steals; NULL for none, or with an exception set. */
static PyObject *caller(PyObject *frame) {
    PyObject *back = PyObject_GetAttr(frame, name_f_back);
    Py_DECREF(frame);
    if (back == Py_None)
        Py_CLEAR(back);
    return back;
}

/* Returns the frame of the innermost module that runs, outside of the function that calls this code. NULL if there is none, or if compiled
   code or a hook of this package runs in it: their code objects are in `codes`, which may be NULL. */
static PyObject *innermost_module(PyObject *codes) {
    PyObject *frame = Py_XNewRef((PyObject *)PyEval_GetFrame());
    for (frame = frame ? caller(frame) : NULL; frame; frame = caller(frame)) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        Py_DECREF(code); /* the frame holds it */
        if (code == functions[CODE])
            return frame;
        PyObject *key = codes ? PyLong_FromVoidPtr(code) : NULL;
        const int is_other = key ? PyDict_Contains(codes, key) : codes ? -1 : 0;
        Py_XDECREF(key);
        if (is_other) {
            Py_DECREF(frame);
            return NULL;
        }
    }
    return NULL;
}

/* Finds the call of a module that a function call belongs to, for one spec: (its name, the name of the function, whether it selects only
   functions that the module calls itself). 1 if its result can be recorded, 0 if it belongs to none, -1 if Python code is needed. */
static int find_owner(FunctionObserver *self, PyObject *selection, PyObject *frame, FunctionOwner *owner) {
    for (Py_ssize_t i = PyList_Size(self->running); i--;) {
        FunctionCall *running = as_function_call(PyList_GetItem(self->running, i));
        if (!running) /* a pause */
            continue;
        PyObject *observer = PyDict_GetItemWithError(running->observers, PyTuple_GetItem(selection, 0));
        if (!observer && PyErr_Occurred())
            return -1;
        if (!observer)
            continue;
        if (PyTuple_GetItem(selection, 2) == Py_True && running->frame != frame)
            return 0;
        PyObject *direct = PyObject_GetAttr(observer, name_direct);
        owner->running = (FunctionCall *)Py_NewRef((PyObject *)running);
        owner->recording = (Recording *)direct;
        const int is_plain = direct && Py_TYPE(direct) == recording_type &&
                             attribute_is(running->firing, name_recompute, Py_False) == 1 &&
                             attribute_is(owner->recording->clock, name_closed, Py_False) == 1;
        return is_plain ? 1 : -1;
    }
    return 0;
}

/* Counts the call of a function in a call of a module, and sets its path. 0, or -1 with an exception set. */
static int count_function(FunctionOwner *owner, PyObject *selection, PyObject *paths) {
    PyObject *counts = owner->running->counts, *called = owner->running->called, *attached = owner->recording->counts;
    PyObject *number = PyDict_GetItemWithError(counts, selection);
    const Py_ssize_t index = number ? PyLong_AsSsize_t(number) : 0;
    PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(index + 1);
    int result = next ? PyDict_SetItem(counts, selection, next) : -1;
    Py_XDECREF(next);
    const int is_called = result ? -1 : PyDict_Contains(called, attached);
    if (is_called < 1)
        result = is_called ? -1 : PyDict_SetItem(called, attached, Py_False);
    while (!result && index >= PyList_Size(paths)) {
        PyObject *path = PyUnicode_FromFormat("%U.%zd", PyTuple_GetItem(selection, 1), PyList_Size(paths));
        result = path ? PyList_Append(paths, path) : -1;
        Py_XDECREF(path);
    }
    if (!result)
        owner->path = Py_NewRef(PyList_GetItem(paths, index));
    return result;
}

/* Passes a result to Python code for the owners that cannot record it here: it is not one plain tensor. 0, or -1 with an exception set. */
static int finish_result(FunctionObserver *self, const FunctionOwner *owners, Py_ssize_t count, PyObject *function, PyObject *name,
                         PyObject *args, PyObject *kwargs, PyObject *result) {
    PyObject *left = PyList_New(0);
    for (Py_ssize_t i = 0; left && i < count; i++) {
        PyObject *owner = PyTuple_Pack(3, (PyObject *)owners[i].running, owners[i].recording->counts, owners[i].path);
        if (!owner || PyList_Append(left, owner))
            Py_CLEAR(left);
        Py_XDECREF(owner);
    }
    PyObject *done = left ? PyObject_CallFunctionObjArgs(self->finish, function, name, left, args, kwargs, result, NULL) : NULL;
    Py_XDECREF(left);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *observer_call(FunctionObserver *self, PyObject *given, PyObject *unused) {
    PyObject *function, *args, *kwargs, *frame = NULL, *result = NULL;
    FunctionOwner owners[MAX_OWNERS] = {{NULL, NULL, NULL}};
    Py_ssize_t count = 0;
    (void)unused;
    if (PyTuple_Size(given) != 3)
        return PyErr_Format(PyExc_TypeError, "expected a function, its arguments and its keyword arguments");
    function = PyTuple_GetItem(given, 0);
    args = PyTuple_GetItem(given, 1);
    kwargs = PyTuple_GetItem(given, 2);
    PyObject *known = PyTuple_Check(args) && (kwargs == Py_None || PyDict_Check(kwargs)) ? PyDict_GetItemWithError(self->known, function) : NULL;
    if (known == Py_None)
        return PyObject_Call(function, args, kwargs == Py_None ? NULL : kwargs);
    int is_plain = known && PyTuple_GetItem(known, 2) == Py_True;
    PyObject *selections = is_plain ? Py_NewRef(PyTuple_GetItem(known, 1)) : NULL, *paths = is_plain ? Py_NewRef(PyTuple_GetItem(known, 3)) : NULL;
    PyObject *name = is_plain ? Py_NewRef(PyTuple_GetItem(known, 0)) : NULL;
    if (is_plain && PyTuple_Size(selections) <= MAX_OWNERS && is_object(PyObject_CallNoArgs(functions[TRANSFORM]), Py_None) == 1)
        frame = innermost_module(self->codes);
    PyObject *selected[MAX_OWNERS];
    is_plain = frame != NULL;
    for (Py_ssize_t i = 0; is_plain && i < PyTuple_Size(selections); i++) {
        selected[count] = PyTuple_GetItem(selections, i);
        const int found = find_owner(self, selected[count], frame, &owners[count]);
        count += found != 0;
        is_plain = found >= 0;
    }
    if (!known && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) /* a function that cannot be hashed */
        PyErr_Clear();
    int error = PyErr_Occurred() != NULL;
    for (Py_ssize_t i = 0; is_plain && !error && i < count; i++)
        error = count_function(&owners[i], selected[i], paths);
    if (!error && !is_plain)
        result = PyObject_CallFunctionObjArgs(self->observe, function, args, kwargs, NULL);
    else if (!error) {
        result = PyObject_Call(function, args, kwargs == Py_None ? NULL : kwargs);
        for (Py_ssize_t i = 0; result && i < count; i++) {
            const int added = record_at(owners[i].recording, result, owners[i].path, owners[i].running->firing);
            error = added == 1 ? PyDict_SetItem(owners[i].running->called, owners[i].recording->counts, Py_True)
                    : added    ? -1
                               : finish_result(self, &owners[i], count - i, function, name, args, kwargs, result);
            if (error)
                Py_CLEAR(result);
            if (!added)
                break;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF((PyObject *)owners[i].running);
        Py_XDECREF(owners[i].path);
        Py_XDECREF((PyObject *)owners[i].recording);
    }
    Py_XDECREF(frame);
    Py_XDECREF(selections);
    Py_XDECREF(paths);
    Py_XDECREF(name);
    return result;
}

HOLDER_TYPE(observer, FunctionObserver, 0, "Calls the functions that a mode sees, and records their results.", observer_dealloc,
            {Py_tp_new, observer_new}, {Py_tp_call, observer_call})

typedef struct {
    PyObject_HEAD PyObject *clock, *indices, *threads, *calls, *class, *observers, *leaf_hooks;
    PyObject *observer, *firing; /* of the latest call that `begin_call` began */
    long long index;             /* of this call */
    int is_shared;
} FunctionCalls;

HOLDER(functions, 9)

static PyObject *functions_new(PyTypeObject *class, PyObject *args, PyObject *kwargs) {
    PyObject *given[7]; /* clock, indices, threads, calls, class, observers, leaf hooks */
    int is_shared;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!pOOO!O!O", &given[0], indices_type, &given[1], &is_shared, &given[2], &given[3], &PyType_Type,
                          &given[4], &PyDict_Type, &given[5], &given[6]))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)given[4], function_call_type))
        return PyErr_Format(PyExc_TypeError, "the class must be derived from FunctionCall");
    FunctionCalls *self = (FunctionCalls *)new_holder(class, given, 7);
    if (self)
        self->is_shared = is_shared;
    return (PyObject *)self;
}

/* Returns the observer of this thread's mode; NULL if Python code is needed. */
static FunctionObserver *observer_here(FunctionCalls *self) {
    PyObject *mode = PyObject_GetAttr(self->threads, name_mode);
    PyObject *observer = mode ? PyObject_GetAttr(mode, name_observe) : NULL;
    Py_XDECREF(mode);
    if (observer && Py_TYPE(observer) != observer_type)
        Py_CLEAR(observer);
    return (FunctionObserver *)observer;
}

/* Whether a mode is the innermost active one. 2 if no mode is active, 0 if another one is the innermost. -1 with an exception set. */
static int is_innermost(PyObject *mode) {
    PyObject *depth = PyObject_CallNoArgs(functions[MODES]);
    const long modes = depth ? PyLong_AsLong(depth) : -1;
    Py_XDECREF(depth);
    return modes < 1 ? (modes < 0 ? -1 : 2) : is_object(PyObject_CallFunction(functions[MODE_AT], "l", modes - 1), mode);
}

/* Whether a frame runs, at most `MAX_FRAMES` frames further out than another one. -1 with an exception set. */
static int is_close(PyObject *frame, PyObject *inner) {
    PyObject *outer = Py_NewRef(inner);
    for (int i = 0; outer && outer != frame && i < MAX_FRAMES; i++)
        outer = caller(outer);
    const int result = PyErr_Occurred() ? -1 : outer == frame;
    Py_XDECREF(outer);
    return result;
}

/* Whether a mode is active, if a call of a module can start in a frame without other changes; -1 if Python code is needed. */
static int is_active_at_start(FunctionObserver *observer, PyObject *frame) {
    const Py_ssize_t count = PyList_Size(observer->running);
    if (PyDict_Contains(PyImport_GetModuleDict(), compiler_module) && attribute_is(observer->mode, name_knows_compiler, Py_True) != 1)
        return -1;
    if (count) { /* PyTorch calls no hook after an interrupt */
        PyObject *outer = PyObject_GetAttr(PyList_GetItem(observer->running, count - 1), name_frame);
        const int is_running = outer ? is_close(outer, frame) : -1;
        Py_XDECREF(outer);
        if (is_running != 1)
            return -1;
    }
    const int innermost = is_innermost(observer->mode);
    return innermost == 2 ? 0 : innermost ? innermost : is_object(PyObject_CallMethodObjArgs(observer->mode, name_is_active, NULL), Py_True);
}

static PyObject *functions_enter(FunctionCalls *self, PyObject *given) {
    PyObject *group, *args, *call = NULL, *firing = NULL, *running = NULL;
    CallIndices *indices = (CallIndices *)self->indices;
    if (PyTuple_Size(given) != 2)
        return PyErr_Format(PyExc_TypeError, "expected a hook group and the arguments of its module");
    group = PyTuple_GetItem(given, 0);
    args = PyTuple_GetItem(given, 1);
    const int is_run = !are_hooks_inactive(self->clock) && is_object(PyObject_CallNoArgs(functions[COMPILER]), Py_None) == 1;
    FunctionObserver *observer = is_run ? observer_here(self) : NULL;
    PyObject *frame = observer ? innermost_module(NULL) : NULL;
    const int is_active = frame ? is_active_at_start(observer, frame) : -1;
    if (is_active >= 0) {
        const int begun = self->is_shared ? 0 : begin_call(indices, self->clock);
        if (begun == 1) {
            call = Py_NewRef(Py_None);
            firing = self->firing && self->index == indices->open_index ? Py_NewRef(self->firing) : firing_of_call(indices->open_index);
        } else if (!begun) {
            call = PyObject_CallMethodObjArgs(self->calls, name_enter, group, args, NULL);
            firing = call ? PyObject_CallMethodObjArgs(call, name_firing, NULL) : NULL;
        }
        running = firing ? new_function_call((PyTypeObject *)self->class, frame, self->observers, self->leaf_hooks, call, firing) : NULL;
        if (running) {
            ((FunctionCall *)running)->has_switched_mode = !is_active;
            if ((!is_active && is_object(PyObject_CallFunctionObjArgs(functions[PUSH_MODE], observer->mode, NULL), Py_None) < 0) ||
                PyList_Append(observer->running, running))
                Py_CLEAR(running);
        }
        if (running && begun == 1) {
            PyObject *old_firing = self->firing, *old_observer = self->observer;
            self->firing = Py_NewRef(firing);
            self->observer = Py_NewRef((PyObject *)observer);
            self->index = indices->open_index;
            Py_XDECREF(old_firing);
            Py_XDECREF(old_observer);
        }
        Py_XDECREF(call);
        Py_XDECREF(firing);
    }
    Py_XDECREF(frame);
    Py_XDECREF((PyObject *)observer);
    Py_XDECREF(running);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(running != NULL);
}

/* Counts the firings of a call of a module that has ended. 0, or -1 with an exception set. */
static int update_coverage(FunctionCall *running) {
    PyObject *observer, *has_fired;
    int have_fired = PyDict_Size(running->called) == PyDict_Size(running->observers) ? attribute_is(running->firing, name_recompute, Py_False) : 0;
    for (Py_ssize_t i = 0; have_fired == 1 && PyDict_Next(running->called, &i, NULL, &has_fired);)
        have_fired = has_fired == Py_True;
    for (Py_ssize_t i = 0; have_fired == 1 && PyDict_Next(running->called, &i, &observer, NULL);) {
        ((FiringCounts *)observer)->opportunities++;
        ((FiringCounts *)observer)->firings++;
    }
    return have_fired ? have_fired - 1 : is_object(PyObject_CallMethodObjArgs((PyObject *)running, name_update_coverage, NULL), Py_None);
}

/* Removes the innermost active mode, if it is the expected one. Returns whether it did. */
static int pop_mode(PyObject *mode) {
    PyObject *popped = PyObject_CallNoArgs(functions[POP_MODE]);
    const int is_expected = popped == mode;
    if (!popped) /* no mode is active */
        PyErr_Clear();
    else if (!is_expected)
        Py_XDECREF(PyObject_CallFunctionObjArgs(functions[PUSH_MODE], popped, NULL));
    Py_XDECREF(popped);
    return is_expected;
}

static PyObject *functions_leave(FunctionCalls *self, PyObject *group) {
    CallIndices *indices = (CallIndices *)self->indices;
    FunctionObserver *observer = NULL;
    if (attribute_is(self->clock, name_closed, Py_False) == 1)
        observer = self->observer && is_open_here(indices) ? (FunctionObserver *)Py_NewRef(self->observer) : observer_here(self);
    const Py_ssize_t count = observer ? PyList_Size(observer->running) : 0;
    FunctionCall *running = count ? as_function_call(PyList_GetItem(observer->running, count - 1)) : NULL;
    Py_XINCREF((PyObject *)running);
    PyObject *frame = running ? Py_XNewRef((PyObject *)PyEval_GetFrame()) : NULL, *inside = frame ? caller(frame) : NULL;
    const int has_raised = inside && is_module_call(inside);
    PyObject *outside = inside ? caller(inside) : NULL;
    const int is_plain = outside && !has_raised && running->frame == outside && (!running->has_switched_mode || pop_mode(observer->mode));
    if (is_plain && !PyList_SetSlice(observer->running, count - 1, count, NULL)) {
        if (is_open_here(indices))
            indices->is_open = 0;
        else
            Py_XDECREF(PyObject_CallMethodObjArgs(self->calls, name_leave, group, NULL));
        if (!PyErr_Occurred())
            update_coverage(running);
    }
    Py_XDECREF(outside);
    Py_XDECREF((PyObject *)running);
    Py_XDECREF((PyObject *)observer);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_plain);
}

static PyMethodDef functions_methods[] = {
    {"enter", (PyCFunction)functions_enter, METH_VARARGS, "enter(group, args) -> bool"},
    {"leave", (PyCFunction)functions_leave, METH_O, "leave(group) -> bool"},
    {NULL, NULL, 0, NULL},
};

HOLDER_TYPE(functions, FunctionCalls, 0, "Starts and ends the observation of the functions of a module.", functions_dealloc,
            {Py_tp_new, functions_new}, {Py_tp_methods, functions_methods})

/* ---------------------------------------------------------------------------------------------------------------- module */

static PyMethodDef functions_of_module[] = {
    {"connect_torch", connect_torch, METH_VARARGS,
     "connect_torch(transform, is tracing, graph task, is grad enabled, packing hooks, ordered dict, firing, register at base, compiler, "
     "modes, mode at, push mode, pop mode, code) -> None"},
    {"update_counts", update_counts, METH_O, "update_counts(counts) -> list"},
};

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    return type && !PyModule_AddObjectRef(module, name, type) ? (PyTypeObject *)type : NULL;
}

int add_plain_calls(PyObject *module) {
#define INTERN(NAME) name_##NAME = PyUnicode_InternFromString(#NAME);
    NAMES(INTERN)
    no_path = PyUnicode_InternFromString("");
    minus_one = PyLong_FromLong(-1);
    compiler_module = PyUnicode_InternFromString("torch._dynamo.eval_frame");
    for (size_t i = 0; i < sizeof functions_of_module / sizeof *functions_of_module; i++) {
        PyObject *function = PyCFunction_New(&functions_of_module[i], NULL);
        if (!function || PyModule_AddObjectRef(module, functions_of_module[i].ml_name, function))
            return -1;
        Py_DECREF(function);
    }
    counts_type = add_type(module, "FiringCounts", &counts_spec);
    indices_type = add_type(module, "CallIndices", &indices_spec);
    recording_type = add_type(module, "Recording", &recording_spec);
    changing_type = add_type(module, "Changing", &changing_spec);
    gradient_type = add_type(module, "OutputGradientHook", &gradient_spec);
    observer_type = add_type(module, "FunctionObserver", &observer_spec);
    function_call_type = add_type(module, "FunctionCall", &function_call_spec);
    const int are_added = add_type(module, "PlainCalls", &calls_spec) && add_type(module, "FunctionCalls", &functions_spec);
    return counts_type && indices_type && recording_type && changing_type && gradient_type && observer_type && function_call_type && are_added && !PyErr_Occurred() ? 0 : -1;
}
