/* Declarations that the C files of `instrument.stats.native` share. */

#ifndef INSTRUMENT_NATIVE_H
#define INSTRUMENT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(hidden)
#endif

/* Whether an object is a `Tensor` or `Parameter` on any device with at least two elements of float16, bfloat16, float32 or float64 in a
   contiguous block. */
int has_kernel_layout(PyObject *object);

extern PyTypeObject *slab_type; /* the class `Slab` */

/* `Slab.add`: 1 if the row was added, 0 if not, and -1 with an exception set. */
int add_to_slab(PyObject *slab, PyObject *tensor, long long slot, PyObject *moment, int further);

/* What the cast of a tensor loses (`instrument/stats/casts.c`); see `instrument.stats.cpu_kernel.lost_by_cast`. */
PyObject *lost_by_cast(PyObject *self, PyObject *args);

/* Adds the types and the functions of `instrument/hooks/plain_calls.c` to the module. Returns 0, or -1 with an exception set. */
int add_plain_calls(PyObject *module);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
