/* Moments and histograms of floating-point numbers, each computed in one pass over memory.

   Both functions read `count` contiguous elements at `address`. `kind` is 0 for float32, 1 for bfloat16, 2 for float64.
   The global interpreter lock is released during the computation.

   moments(address, count, kind, shift, with_l1) -> (n, nan, inf, zeros, low, high, sum, squares, l1)

   n is the number of finite elements; nan and inf count the others. Over the finite elements: zeros is the number of
   zeros, low and high are the minimum and maximum, sum is sum(x - shift), squares is sum((x - shift)^2), and l1 is
   sum(|x|) if requested. Sums are in double precision, in 16 lanes per chunk. A chunk with a sum that is not finite is
   read again, element by element.

   histogram(address, count, kind, low, high, bins, counts) -> None

   Adds the number of elements in each of `bins` equal-width bins from low to high to the int64 array at `counts`. An
   element on an edge belongs to the bin above it, and high to the last bin. Elements outside the range and NaN are
   ignored. If low equals high, all elements are in the first bin. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define CHUNK 4096 /* elements between two checks for values that are not finite */
#define AHEAD 1024 /* elements that are prefetched */
#define TURNS 4    /* arrays of counts, used in turn: incrementing one count twice in a row would stall */
#define MOST_BINS 65536

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

/* One kernel per type: ELEMENT is the type in memory, VALUE the type for comparisons, READ converts one to the other. */
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

/* The factor for all values that keeps the width of the range and its inverse finite. */
static double unit_of(double low, double high) {
    const double width = high - low;
    return !isfinite(width) ? 0.5 : width > 0.0 && width < 0x1p-1000 ? 0x1p+600 : 1.0;
}

/* The first loop finds the bin of each element without branches. Ignored elements go to an additional last bin. */
#define HISTOGRAM(NAME, ELEMENT, READ)                                                                                \
    FOR_EACH_PROCESSOR                                                                                                \
    static void NAME(const ELEMENT *x, size_t count, double low, double high, int32_t bins, int64_t *counts) {        \
        const double unit = unit_of(low, high), base = low * unit;                                                    \
        const double scale = high > low ? bins / (high * unit - base) : 0.0;                                          \
        int32_t part[CHUNK];                                                                                          \
        for (size_t start = 0; start < count; start += CHUNK) {                                                       \
            const ELEMENT *chunk = x + start;                                                                         \
            const int size = (int)(count - start < CHUNK ? count - start : CHUNK);                                    \
            for (int i = 0; i < size; i++) {                                                                          \
                const double value = READ(chunk[i]);                                                                  \
                const int inside = (value >= low) & (value <= high);                                                  \
                const double at = inside ? (value * unit - base) * scale : 0.0;                                       \
                const double last = bins - 1, up = at < last ? at : last, found = up > 0.0 ? up : 0.0;                \
                part[i] = inside ? (int32_t)found : bins;                                                             \
            }                                                                                                         \
            for (int i = 0; i < size; i++)                                                                            \
                counts[(size_t)(i % TURNS) * ((size_t)bins + 1) + (size_t)part[i]]++;                                 \
        }                                                                                                             \
    }

HISTOGRAM(bins_of_float32, float, AS_IT_IS)
HISTOGRAM(bins_of_bfloat16, uint16_t, from_bfloat16)
HISTOGRAM(bins_of_float64, double, AS_IT_IS)

static PyObject *histogram(PyObject *self, PyObject *args) {
    unsigned long long address, result;
    Py_ssize_t count;
    int kind, bins;
    double low, high;
    (void)self;
    if (!PyArg_ParseTuple(args, "KniddiK", &address, &count, &kind, &low, &high, &bins, &result))
        return NULL;
    if (kind < 0 || kind > 2 || count < 0 || bins < 1 || bins > MOST_BINS) {
        PyErr_SetString(PyExc_ValueError, "kind has to be 0, 1 or 2, count 0 or more, and bins 1 to 65536");
        return NULL;
    }
    const void *memory = (const void *)(uintptr_t)address;
    int64_t *totals = (int64_t *)(uintptr_t)result;
    int64_t *counts = PyMem_Calloc((size_t)(bins + 1) * TURNS, sizeof *counts);
    if (!counts)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    if (kind == 0)
        bins_of_float32(memory, (size_t)count, low, high, bins, counts);
    else if (kind == 1)
        bins_of_bfloat16(memory, (size_t)count, low, high, bins, counts);
    else
        bins_of_float64(memory, (size_t)count, low, high, bins, counts);
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i < bins; i++)
            totals[i] += counts[turn * (bins + 1) + i];
    Py_END_ALLOW_THREADS
    PyMem_Free(counts);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"moments", moments, METH_VARARGS,
     "moments(address, count, kind, shift, with_l1) -> (n, nan, inf, zeros, low, high, sum, squares, l1)"},
    {"histogram", histogram, METH_VARARGS, "histogram(address, count, kind, low, high, bins, counts) -> None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "native", "Moments and histograms of floats, each in one pass over memory.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
