/* Moments of floats in one pass over memory.

   moments(address, count, kind, shift, with_l1) -> (n, nan, inf, zeros, low, high, sum, squares, l1)

   Reads `count` elements of C-contiguous memory at `address`: kind 0 float32, 1 bfloat16, 2 float64. Of the finite
   ones, n of them: how many are zero, the smallest and the largest, sum(x - shift), sum((x - shift)^2) and, where it is
   asked for, sum(|x|). All sums are formed in double, in 16 lanes a chunk. A chunk whose sum is not finite is gone
   through once more, element by element. The interpreter's lock is let go of meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define CHUNK 4096 /* elements between two looks at whether all is finite */
#define AHEAD 1024 /* elements that are fetched ahead of their use */

#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) (void)(address)
#endif

typedef struct {
    int64_t n, nan, inf, zeros;
    double low, high, sum, squares, l1;
} Moments;

static inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

#define AS_IT_IS(x) (x)

/* One kernel a type: ELEMENT as it lies in memory, VALUE as it is compared, READ from the one to the other. */
#define KERNEL(NAME, ELEMENT, VALUE, READ)                                                                            \
    static void NAME##_slowly(const ELEMENT *x, size_t count, double shift, Moments *m) {                             \
        for (size_t i = 0; i < count; i++) {                                                                          \
            const double value = READ(x[i]);                                                                          \
            if (isnan(value)) {                                                                                       \
                m->nan++;                                                                                             \
            } else if (isinf(value)) {                                                                                \
                m->inf++;                                                                                             \
            } else {                                                                                                  \
                m->n++;                                                                                               \
                m->zeros += value == 0.0;                                                                             \
                m->low = value < m->low ? value : m->low;                                                             \
                m->high = value > m->high ? value : m->high;                                                          \
                m->sum += value - shift;                                                                              \
                m->squares += (value - shift) * (value - shift);                                                      \
                m->l1 += fabs(value);                                                                                 \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    FOR_EACH_PROCESSOR                                                                                                \
    static void NAME(const ELEMENT *x, size_t count, double shift, int with_l1, Moments *m) {                         \
        for (size_t start = 0; start < count; start += CHUNK) {                                                       \
            const ELEMENT *chunk = x + start;                                                                         \
            const size_t size = count - start < CHUNK ? count - start : CHUNK;                                        \
            const size_t whole = size - size % LANES;                                                                 \
            VALUE low[LANES], high[LANES];                                                                            \
            double sum[LANES] = {0}, squares[LANES] = {0}, l1[LANES] = {0};                                           \
            int32_t zeros[LANES] = {0};                                                                               \
            for (int j = 0; j < LANES; j++)                                                                           \
                low[j] = high[j] = whole ? READ(chunk[j]) : 0;                                                        \
            for (size_t i = 0; i < whole; i += LANES) {                                                               \
                PREFETCH(chunk + i + AHEAD);                                                                          \
                for (int j = 0; j < LANES; j++) {                                                                     \
                    const VALUE value = READ(chunk[i + j]);                                                           \
                    const double moved = (double)value - shift;                                                       \
                    sum[j] += moved;                                                                                  \
                    squares[j] += moved * moved;                                                                      \
                    low[j] = value < low[j] ? value : low[j];                                                         \
                    high[j] = value > high[j] ? value : high[j];                                                      \
                    zeros[j] += value == 0;                                                                           \
                }                                                                                                     \
            }                                                                                                         \
            if (with_l1)                                                                                              \
                for (size_t i = 0; i < whole; i += LANES)                                                             \
                    for (int j = 0; j < LANES; j++)                                                                   \
                        l1[j] += fabs((double)READ(chunk[i + j]));                                                    \
            double total = 0.0;                                                                                       \
            for (int j = 0; j < LANES; j++)                                                                           \
                total += sum[j];                                                                                      \
            if (!isfinite(total)) {                                                                                   \
                NAME##_slowly(chunk, size, shift, m);                                                                 \
                continue;                                                                                             \
            }                                                                                                         \
            m->n += whole;                                                                                            \
            m->sum += total;                                                                                          \
            for (int j = 0; j < LANES && whole; j++) {                                                                \
                m->low = low[j] < m->low ? low[j] : m->low;                                                           \
                m->high = high[j] > m->high ? high[j] : m->high;                                                      \
                m->squares += squares[j];                                                                             \
                m->l1 += l1[j];                                                                                       \
                m->zeros += zeros[j];                                                                                 \
            }                                                                                                         \
            NAME##_slowly(chunk + whole, size - whole, shift, m);                                                     \
        }                                                                                                             \
    }

KERNEL(of_float32, float, float, AS_IT_IS)
KERNEL(of_bfloat16, uint16_t, float, from_bfloat16)
KERNEL(of_float64, double, double, AS_IT_IS)

static PyObject *moments(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t count;
    int kind, with_l1;
    double shift;
    (void)self;
    if (!PyArg_ParseTuple(args, "Knidp", &address, &count, &kind, &shift, &with_l1))
        return NULL;
    if (kind < 0 || kind > 2 || count < 0) {
        PyErr_SetString(PyExc_ValueError, "kind has to be 0, 1 or 2, and count 0 or more");
        return NULL;
    }
    const void *memory = (const void *)(uintptr_t)address;
    Moments m = {.low = INFINITY, .high = -INFINITY};
    Py_BEGIN_ALLOW_THREADS
    if (kind == 0)
        of_float32(memory, (size_t)count, shift, with_l1, &m);
    else if (kind == 1)
        of_bfloat16(memory, (size_t)count, shift, with_l1, &m);
    else
        of_float64(memory, (size_t)count, shift, with_l1, &m);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(LLLLddddd)", (long long)m.n, (long long)m.nan, (long long)m.inf, (long long)m.zeros, m.low,
                         m.high, m.sum, m.squares, m.l1);
}

static PyMethodDef methods[] = {
    {"moments", moments, METH_VARARGS,
     "moments(address, count, kind, shift, with_l1) -> (n, nan, inf, zeros, low, high, sum, squares, l1)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "native", "Moments of floats in one pass over memory.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
