/* Declarations that the C files of `instrument.stats.native` share. */

#ifndef INSTRUMENT_NATIVE_H
#define INSTRUMENT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#define CHUNK 4096 /* elements between two checks for values that are not finite */

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#pragma GCC visibility push(hidden)
#else
#define PREFETCH(address) (void)(address)
#endif

/* Whether an object is a `Tensor` or `Parameter` on any device with at least two elements of float16, bfloat16, float32 or float64 in a
   contiguous block. */
int has_kernel_layout(PyObject *object);

extern PyTypeObject *slab_type; /* the class `Slab` */

/* `Slab.add`: 1 if the row was added, 0 if not, and -1 with an exception set. */
int add_to_slab(PyObject *slab, PyObject *tensor, long long slot, PyObject *moment, int further);

/* `Slab.add_effect`, with the same results. NaN is no factor, and no condition. */
int add_effect_to_slab(PyObject *slab, PyObject *before, PyObject *after, long long slot, PyObject *moment, double factor, double held);

/* A number; NaN for None, and with an exception set. */
double number_or_nan(PyObject *object);

enum { FLOAT32, BFLOAT16, FLOAT64, FLOAT16 }; /* the kinds of elements */

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* Without an operation on a subnormal number, which some programs let the processor flush to zero. */
static inline float from_float16(uint16_t bits) {
    const uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    const float subnormal = float_of(magnitude + 0x38800000u) - 0x1p-14f; /* 2^-14 plus the value, if that is subnormal */
    const uint32_t normal = magnitude + (magnitude < 0x0f800000u ? 0x38000000u : 0x70000000u);
    return float_of((magnitude < 0x00800000u ? bits_of_float(subnormal) : normal) | sign);
}

/* A format with `23 - shift` bits of the mantissa. Below the smallest normal number, whose bits are `normal`, adding and subtracting
   `step` rounds to its subnormal numbers. */
typedef struct {
    int shift;
    uint32_t normal;
    float step, largest;
} Format;

/* The cast of a tensor, block by block, up to the element `at`. A row of `length` elements, which are `inner`
   elements apart, starts a new block. */
typedef struct {
    Format format;
    int kind, scales;
    float scale;
    size_t length, inner, block, at;
    double *numbers, *errors;
} Cast;

/* Reads the last argument of `sums`. Returns false with an exception set. */
int read_cast(PyObject *tuple, int kind, Cast *cast);

/* Casts the further blocks of a tensor that end before the element `end`. */
void add_to_cast(Cast *cast, const void *memory, size_t end);

/* Adds the types and the functions of `instrument/hooks/plain_calls.c` to the module. Returns 0, or -1 with an exception set. */
int add_plain_calls(PyObject *module);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
