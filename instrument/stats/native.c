/* Sums and histograms of floating-point numbers, each computed in one pass over memory.

   `instrument.stats.cpu_kernel` documents the functions and the class `Slab`, and `instrument.stats.sums.BASE` the sums of a tensor. `unit`
   is 1 here: sums of powers of x are not scaled. Without a finite element, all sums but the counts are NaN.

   In all functions, `kind` is 0 for float32, 1 for bfloat16, 2 for float64, and 3 for float16, which on the CPU only the sums support. The
   global interpreter lock is released during the computation, except for small tensors.

   `add` and `add_effect` of a slab with a buffer launch a kernel for tensors on its device, which writes to a row of the buffer. They
   add no row if the buffer is full, if the current stream has no launcher for the dtype, if an address is not divisible by 16, if
   the device is not the current one, while a graph is captured, and if the launch fails; the row of the buffer then stays unused.

   `further` of `add` and `sums` is 1 for the sum of magnitudes, plus 2 for the bits (see `instrument.stats.fingerprint`), which follow the other sums.
   With its last argument, `sums` also computes a cast, in the same read (`casts.c`).

   connect(tensor class, parameter class, exchange API) -> bool

   Gives access to tensors of these two classes. The exchange API is the capsule `__dlpack_c_exchange_api__` of the class,
   which DLPack defines (https://dmlc.github.io/dlpack/latest/c_api.html). False if it cannot describe a tensor without
   a new reference.

   copy_rows(source, bytes, bytes of a row, destination, bytes between two rows of it, indices, sums) -> None

   Copies the rows of the source to rows of the destination by their int64 indices, except for negative ones. In the same
   read, it writes the sum of the 64-bit words of each whole page of the source to `sums`, modulo 2^64.

   add_launcher returns false if no driver is connected, or if there are 256 launchers already, and raises ValueError for invalid
   numbers. A histogram ignores elements outside the range and NaN. If low equals high, all elements are in the first bin. */

#include "native.h"
#include <math.h>

#define LANES 16
#define AHEAD 1024 /* elements that are prefetched */
#define TURNS 4    /* arrays of counts, used in turn: incrementing one count twice in a row would stall */
#define MAX_BINS 65536
#define PAGE 4096  /* bytes of the source of `copy_rows` with a sum each */
#define SMALL 16384 /* elements up to which the global interpreter lock is kept: to release it takes longer than to wait */

enum { NUMEL, FINITE, NANS, ZEROS, LOW, HIGH, MEAN, DEVIATIONS, MAGNITUDES, UNIT, SUMS };
enum { BITS_LOW = SUMS, BITS_HIGH, FORM, ALL_SUMS };
enum { WITH_MAGNITUDES = 1, WITH_BITS = 2 };

/* The limit of squared mean over variance up to which the variance is computed as the difference of two sums. */
#define CANCELLATION 1e6
/* The largest magnitude of float64 elements whose squares a double adds up without loss. */
#define SMALLEST 1e-140
#define LARGEST 1e140

#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__)
#include <immintrin.h>
#define HAS_VECTORS 1
#endif

#if defined(__GNUC__)
#define ALIGNED __attribute__((aligned(64))) /* so that no vector crosses a line of the cache */
#else
#define ALIGNED
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 2")
#define NO_UNROLL _Pragma("GCC unroll 1") /* GCC does not vectorize a loop that it has unrolled */
#else
#define UNROLL
#define NO_UNROLL
#endif

typedef struct {
    int64_t n, nan, inf, zeros;
    double low, high, sum, squares, l1;
} Moments;

static inline uint32_t bits_of_float32(const float *x) { return bits_of_float(*x); }

static inline uint64_t bits_of_float64(const double *x) {
    uint64_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits;
}

#define WIDEN(NAME, FROM)                                                                                             \
    FOR_EACH_PROCESSOR                                                                                                \
    static void NAME(const uint16_t *x, size_t count, float *values) {                                                \
        for (size_t i = 0; i < count; i++)                                                                            \
            values[i] = FROM(x[i]);                                                                                   \
    }

WIDEN(widen_bfloat16, from_bfloat16)
WIDEN(widen_float16, from_float16)

#define AS_IT_IS(x) (x)

/* Calls the function for the kind of the elements, which is not float16. */
#define OF_KIND(NAME, ...)                                                                                            \
    (kind == FLOAT32    ? NAME##_of_float32(__VA_ARGS__)                                                              \
     : kind == BFLOAT16 ? NAME##_of_bfloat16(__VA_ARGS__)                                                             \
                        : NAME##_of_float64(__VA_ARGS__))

/* One kernel per type: ELEMENT is the type in memory, VALUE the type for comparisons, READ converts one to the other. WORD is an
   integer of the size of VALUE, BITS reads one, and INFINITE is that of plus infinity. */
#define KERNEL(NAME, ELEMENT, VALUE, READ, WORD, BITS, INFINITE)                                                      \
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
    static void NAME##_masked(const ELEMENT *x, size_t whole, double shift, Moments *m) {                             \
        VALUE low[LANES], high[LANES];                                                                                \
        double sum[LANES] = {0}, squares[LANES] = {0}, l1[LANES] = {0};                                               \
        WORD n[LANES] = {0}, nan[LANES] = {0}, zeros[LANES] = {0};                                                    \
        for (int j = 0; j < LANES; j++) {                                                                             \
            low[j] = (VALUE)INFINITY;                                                                                 \
            high[j] = (VALUE)-INFINITY;                                                                               \
        }                                                                                                             \
        for (size_t i = 0; i < whole; i += LANES) {                                                                   \
            VALUE kept[LANES], least[LANES], most[LANES];                                                             \
            WORD is_finite[LANES];                                                                                    \
            for (int j = 0; j < LANES; j++) { /* with bits, which the compiler vectorizes */                          \
                const WORD bits = BITS(x + i + j), magnitude = bits & ((WORD)-1 >> 1);                                \
                is_finite[j] = magnitude < INFINITE;                                                                  \
                const WORD mask = (WORD)0 - is_finite[j], none = INFINITE & ~mask;                                    \
                const WORD words[3] = {bits & mask, (bits & mask) | none, (bits & mask) | none | ~(mask | ((WORD)-1 >> 1))};\
                memcpy(kept + j, words, sizeof *words);                                                               \
                memcpy(least + j, words + 1, sizeof *words);                                                          \
                memcpy(most + j, words + 2, sizeof *words);                                                           \
                n[j] += is_finite[j];                                                                                 \
                nan[j] += magnitude > INFINITE;                                                                       \
                zeros[j] += magnitude == 0;                                                                           \
            }                                                                                                         \
            for (int j = 0; j < LANES; j++) {                                                                         \
                const double moved = ((double)kept[j] - shift) * (double)is_finite[j];                                \
                sum[j] += moved;                                                                                      \
                squares[j] += moved * moved;                                                                          \
                l1[j] += fabs((double)kept[j]);                                                                       \
                low[j] = least[j] < low[j] ? least[j] : low[j];                                                       \
                high[j] = most[j] > high[j] ? most[j] : high[j];                                                      \
            }                                                                                                         \
        }                                                                                                             \
        for (int j = 0; j < LANES; j++) {                                                                             \
            m->n += (int64_t)n[j];                                                                                    \
            m->nan += (int64_t)nan[j];                                                                                \
            m->inf += (int64_t)(whole / LANES - n[j] - nan[j]);                                                       \
            m->zeros += (int64_t)zeros[j];                                                                            \
            m->sum += sum[j];                                                                                         \
            m->squares += squares[j];                                                                                 \
            m->l1 += l1[j];                                                                                           \
            m->low = low[j] < m->low ? low[j] : m->low;                                                               \
            m->high = high[j] > m->high ? high[j] : m->high;                                                          \
        }                                                                                                             \
    }

KERNEL(of_float32, float, float, AS_IT_IS, uint32_t, bits_of_float32, 0x7f800000u)
KERNEL(of_float64, double, double, AS_IT_IS, uint64_t, bits_of_float64, 0x7ff0000000000000u)

#define TILE 1024      /* elements of a tile; see `instrument.stats.fingerprint` */
#define MAX_ITEM 16    /* bytes of an element */
#define PIECE 128      /* bytes of which a tile is a multiple */
#define WORDS (TILE * MAX_ITEM / 8)
#define FACTOR 0x9e3779b97f4a7c15u
#define SECOND_FACTOR 0xd6e8feb86659fd93u

static const int item_sizes[] = {4, 2, 8, 2};                                                /* by kind */
static const uint32_t dtype_numbers[] = {0xd8ca9648u, 0x45c68b70u, 0x4cdec738u, 0xed9130d3u}; /* the CRC-32 of their names */
static uint64_t keys_of_words[WORDS] ALIGNED;
static uint64_t numbers_of_zeros[WORDS * 8 / PIECE + 1]; /* of the words before a piece of a tile of zeros */

#define LOW_HALF 0xffffffffu

static uint64_t mixed(uint64_t number) {
    number *= SECOND_FACTOR;
    return (number ^ number >> 32) * FACTOR;
}

/* The number of a tile, mixed with its index. */
static uint64_t of_tile(uint64_t number, size_t tile) { return mixed(number ^ ((uint64_t)tile + 1) * FACTOR); }

static uint64_t rotated(uint64_t x, int count) { return x << count | x >> (64 - count); }

/* The XOR of low(x) * high(x) and of x over words, with x = word ^ key. `at` is the position of the first word in its tile, in bytes. */
typedef struct {
    uint64_t products, words;
} Words_plain;

static inline void add_words_plain(Words_plain *sums, const char *memory, size_t at, size_t size) {
    for (size_t i = 0; i < size / 8; i++) {
        uint64_t x;
        memcpy(&x, memory + 8 * i, sizeof x);
        x ^= keys_of_words[at / 8 + i];
        sums->products ^= (x & LOW_HALF) * (x >> 32);
        sums->words ^= x;
    }
}

static inline uint64_t number_of_plain(const Words_plain *sums) {
    return sums->products ^ rotated(sums->words, 11) ^ rotated(sums->words, 27) ^ rotated(sums->words, 43);
}

/* Adds a condition to a count. Which form takes fewer instructions depends on the processor. */
#define ADD_plain(n, is_one) (n) += (is_one)
#define ADD_avx2 ADD_plain
#define ADD_avx512(n, is_one) (n) = (is_one) ? (n) + 1 : (n)

#define NUMBER_OF_WORDS(TAG, PROCESSOR)                                                                               \
    PROCESSOR static uint64_t number_##TAG(const char *memory, size_t at, size_t size) {                              \
        Words_##TAG sums = {0};                                                                                       \
        for (size_t i = 0; i < size; i += PIECE)                                                                      \
            add_words_##TAG(&sums, memory + i, at + i, PIECE);                                                        \
        return number_of_##TAG(&sums);                                                                                \
    }

NUMBER_OF_WORDS(plain, )

/* The number of the words of pieces. That of several pieces is the XOR of theirs. */
static uint64_t (*number_of_words)(const char *memory, size_t at, size_t size) = number_plain;

#ifdef HAS_VECTORS
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f")))
#define XOR_avx2(a, b, c) _mm256_xor_si256(_mm256_xor_si256(a, b), c)
#define XOR_avx512(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)

/* GCC does not find the instructions that multiply 32-bit numbers, and that combine three numbers. */
#define WORDS_OF(TAG, PROCESSOR, VECTOR, PREFIX, SIZE)                                                                \
    typedef struct {                                                                                                  \
        VECTOR products, words;                                                                                       \
    } Words_##TAG;                                                                                                    \
                                                                                                                      \
    PROCESSOR                                                                                                         \
    static inline VECTOR product_##TAG(const char *memory, size_t at, VECTOR *x) {                                    \
        const VECTOR key = PREFIX##_load_##SIZE((const VECTOR *)((const char *)keys_of_words + at));                  \
        *x = PREFIX##_xor_##SIZE(PREFIX##_loadu_##SIZE((const VECTOR *)memory), key);                                 \
        return PREFIX##_mul_epu32(*x, PREFIX##_shuffle_epi32(*x, 0xf5));                                              \
    }                                                                                                                 \
                                                                                                                      \
    PROCESSOR                                                                                                         \
    static inline void add_words_##TAG(Words_##TAG *sums, const char *memory, size_t at, size_t size) {               \
        const size_t step = sizeof(VECTOR);                                                                           \
        for (size_t i = 0; i < size; i += 2 * step) {                                                                 \
            VECTOR x, second = PREFIX##_setzero_##SIZE(), other = second;                                             \
            const VECTOR first = product_##TAG(memory + i, at + i, &x);                                               \
            if (i + step < size)                                                                                      \
                second = product_##TAG(memory + i + step, at + i + step, &other);                                     \
            sums->products = XOR_##TAG(sums->products, second, first);                                                \
            sums->words = XOR_##TAG(sums->words, other, x);                                                           \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    static inline uint64_t number_of_##TAG(const Words_##TAG *sums) {                                                 \
        uint64_t lanes[2][sizeof(VECTOR) / 8];                                                                        \
        Words_plain total = {0};                                                                                      \
        memcpy(lanes, sums, sizeof lanes);                                                                            \
        for (size_t i = 0; i < sizeof(VECTOR) / 8; i++) {                                                             \
            total.products ^= lanes[0][i];                                                                            \
            total.words ^= lanes[1][i];                                                                               \
        }                                                                                                             \
        return number_of_plain(&total);                                                                               \
    }                                                                                                                 \
                                                                                                                      \
    NUMBER_OF_WORDS(TAG, PROCESSOR)

WORDS_OF(avx512, FOR_AVX512, __m512i, _mm512, si512)
WORDS_OF(avx2, FOR_AVX2, __m256i, _mm256, si256)
#endif

/* The sum over the tiles of consecutive elements, whose first one has the index `tile`. The last one is padded with zeros. */
static uint64_t bits_of(const char *memory, size_t size, size_t item, size_t tile) {
    const size_t tile_size = TILE * item;
    uint64_t sum = 0;
    for (size_t start = 0; start < size; start += tile_size) {
        const size_t left = size - start < tile_size ? size - start : tile_size, whole = left - left % PIECE;
        uint64_t number = number_of_words(memory + start, 0, whole);
        if (left < tile_size) {
            char padded[PIECE] = {0};
            memcpy(padded, memory + start + whole, left - whole);
            number ^= number_of_words(padded, whole, PIECE) ^ numbers_of_zeros[tile_size / PIECE] ^ numbers_of_zeros[whole / PIECE + 1];
        }
        sum += of_tile(number, tile++);
    }
    return sum;
}

/* The sums of a tensor, for GROUP lanes at a time, whose sums fit in the registers. WITH bits, and without a shift, the same read gives the
   sum over its whole tiles; the other sums stay bit-identical. */
#define SUMS_OF(FUNCTION, PROCESSOR, NAME, ELEMENT, VALUE, READ, COUNT, GROUP, WITH, TAG)                             \
    PROCESSOR                                                                                                         \
    static void FUNCTION(const void *memory, size_t first, size_t end, double shift, int with_l1, Moments *m, uint64_t *bits) {\
        for (size_t start = first; start < end; start += CHUNK) {                                                     \
            const ELEMENT *chunk = (const ELEMENT *)memory + start;                                                   \
            const size_t size = end - start < CHUNK ? end - start : CHUNK;                                            \
            const size_t whole = size - size % LANES, step_size = GROUP * sizeof(ELEMENT);                            \
            VALUE low[LANES], high[LANES];                                                                            \
            double sum[LANES] = {0}, squares[LANES] = {0}, l1[LANES] = {0};                                           \
            COUNT zeros[LANES] = {0};                                                                                 \
            for (int j = 0; j < LANES; j++)                                                                           \
                low[j] = high[j] = whole ? READ(chunk[j]) : 0;                                                        \
            for (size_t tile = 0; tile < whole; tile += TILE) {                                                       \
                const size_t stop = whole - tile < TILE ? whole : tile + TILE;                                        \
                Words_##TAG words = {0};                                                                              \
                for (int group = 0; group < LANES; group += GROUP) {                                                  \
                    VALUE lows[GROUP], highs[GROUP];                                                                  \
                    double sums[GROUP], powers[GROUP];                                                                \
                    COUNT counts[GROUP];                                                                              \
                    for (int j = 0; j < GROUP; j++) { /* not memcpy, so that they stay in registers */                \
                        lows[j] = low[group + j];                                                                     \
                        highs[j] = high[group + j];                                                                   \
                        sums[j] = sum[group + j];                                                                     \
                        powers[j] = squares[group + j];                                                               \
                        counts[j] = zeros[group + j];                                                                 \
                    }                                                                                                 \
                    UNROLL                                                                                            \
                    for (size_t i = tile + group; i < stop; i += LANES) {                                             \
                        for (size_t line = 0; line < step_size; line += 64)                                           \
                            PREFETCH((const char *)(chunk + i + AHEAD) + line);                                       \
                        NO_UNROLL                                                                                     \
                        for (int j = 0; j < GROUP; j++) {                                                             \
                            const VALUE value = READ(chunk[i + j]);                                                   \
                            const double moved = (double)value - (WITH ? 0.0 : shift);                                \
                            sums[j] += moved;                                                                         \
                            powers[j] += moved * moved;                                                               \
                            lows[j] = value < lows[j] ? value : lows[j];                                              \
                            highs[j] = value > highs[j] ? value : highs[j];                                           \
                            ADD_##TAG(counts[j], value == 0);                                                         \
                        }                                                                                             \
                        if (WITH)                                                                                     \
                            add_words_##TAG(&words, (const char *)(chunk + i), (i - tile) * sizeof(ELEMENT), step_size);\
                    }                                                                                                 \
                    for (int j = 0; j < GROUP; j++) {                                                                 \
                        low[group + j] = lows[j];                                                                     \
                        high[group + j] = highs[j];                                                                   \
                        sum[group + j] = sums[j];                                                                     \
                        squares[group + j] = powers[j];                                                               \
                        zeros[group + j] = counts[j];                                                                 \
                    }                                                                                                 \
                }                                                                                                     \
                if (WITH && stop - tile == TILE)                                                                      \
                    *bits += of_tile(number_of_##TAG(&words), (start + tile) / TILE);                                 \
            }                                                                                                         \
            if (with_l1)                                                                                              \
                for (size_t i = 0; i < whole; i += LANES)                                                             \
                    for (int j = 0; j < LANES; j++)                                                                   \
                        l1[j] += fabs((double)READ(chunk[i + j]));                                                    \
            double total = 0.0;                                                                                       \
            for (int j = 0; j < LANES; j++)                                                                           \
                total += sum[j];                                                                                      \
            if (!isfinite(total)) {                                                                                   \
                NAME##_masked(chunk, whole, shift, m);                                                                \
                NAME##_slowly(chunk + whole, size - whole, shift, m);                                                 \
                continue;                                                                                             \
            }                                                                                                         \
            m->n += whole;                                                                                            \
            m->sum += total;                                                                                          \
            for (int j = 0; j < LANES && whole; j++) {                                                                \
                m->low = low[j] < m->low ? low[j] : m->low;                                                           \
                m->high = high[j] > m->high ? high[j] : m->high;                                                      \
                m->squares += squares[j];                                                                             \
                m->l1 += l1[j];                                                                                       \
                m->zeros += (int64_t)zeros[j];                                                                        \
            }                                                                                                         \
            NAME##_slowly(chunk + whole, size - whole, shift, m);                                                     \
        }                                                                                                             \
    }

typedef void Kernel(const void *memory, size_t first, size_t end, double shift, int with_l1, Moments *m, uint64_t *bits);

#define KERNELS(TAG, PROCESSOR, COUNT, GROUP)                                                                         \
    SUMS_OF(float32_##TAG, PROCESSOR, of_float32, float, float, AS_IT_IS, uint32_t, LANES, 0, TAG)                    \
    SUMS_OF(float64_##TAG, PROCESSOR, of_float64, double, double, AS_IT_IS, COUNT, GROUP, 0, TAG)                     \
    SUMS_OF(float32_bits_##TAG, PROCESSOR, of_float32, float, float, AS_IT_IS, uint32_t, LANES, 1, TAG)               \
    SUMS_OF(float64_bits_##TAG, PROCESSOR, of_float64, double, double, AS_IT_IS, COUNT, GROUP, 1, TAG)                \
    static Kernel *const kernels_##TAG[2][2] = {{float32_##TAG, float64_##TAG}, {float32_bits_##TAG, float64_bits_##TAG}};

KERNELS(plain, , uint32_t, LANES)
#ifdef HAS_VECTORS
KERNELS(avx2, FOR_AVX2, uint64_t, 8)
KERNELS(avx512, FOR_AVX512, uint64_t, LANES)
#endif

static Kernel *const (*kernels)[2] = kernels_plain; /* by whether bits are requested, and whether elements are float64 */

static void choose_kernels(void) {
    for (size_t i = 0; i < WORDS; i++)
        keys_of_words[i] = mixed(mixed(i + 1) + 1);
#ifdef HAS_VECTORS
    if (__builtin_cpu_supports("avx512f")) {
        number_of_words = number_avx512;
        kernels = kernels_avx512;
    } else if (__builtin_cpu_supports("avx2")) {
        number_of_words = number_avx2;
        kernels = kernels_avx2;
    }
#endif
    const char zeros[PIECE] = {0};
    for (size_t i = 0; i < WORDS * 8; i += PIECE)
        numbers_of_zeros[i / PIECE + 1] = numbers_of_zeros[i / PIECE] ^ number_of_words(zeros, i, PIECE);
}

/* A number of 52 bits for a dtype and a shape. */
static double form_of(int kind, int64_t ndim, const int64_t *shape) {
    uint64_t form = dtype_numbers[kind];
    for (int64_t i = -1; i < ndim; i++) {
        form = (form ^ (uint64_t)(i < 0 ? ndim : shape[i])) * SECOND_FACTOR;
        form ^= form >> 32;
    }
    return (double)(form >> 12);
}

static PyObject *bits(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t size, item;
    uint64_t sum;
    (void)self;
    if (!PyArg_ParseTuple(args, "Knn", &address, &size, &item))
        return NULL;
    if (size < 0 || item < 1 || item > MAX_ITEM)
        return PyErr_Format(PyExc_ValueError, "the number of bytes has to be 0 or more, and the size of an element 1 to 16");
    Py_BEGIN_ALLOW_THREADS
    sum = bits_of((const char *)(uintptr_t)address, (size_t)size, (size_t)item, 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(sum);
}

FOR_EACH_PROCESSOR
static uint64_t sum_of_page(const char *memory) {
    uint64_t sum = 0, words[8];
    for (size_t i = 0; i < PAGE; i += sizeof words) {
        PREFETCH(memory + i + PAGE);
        memcpy(words, memory + i, sizeof words);
        for (int k = 0; k < 8; k++)
            sum += words[k];
    }
    return sum;
}

/* Copies past the cache if possible: the memory does not have to be read before it is written. */
static void copy_past_cache(char *to, const char *from, size_t size) {
#ifdef HAS_VECTORS
    if (((uintptr_t)to | size) % sizeof(__m128i) == 0) {
        for (size_t i = 0; i < size; i += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        return;
    }
#endif
    memcpy(to, from, size);
}

static PyObject *copy_rows(PyObject *self, PyObject *args) {
    unsigned long long source, destination, rows, totals;
    Py_ssize_t bytes, row, stride;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnKnKK", &source, &bytes, &row, &destination, &stride, &rows, &totals))
        return NULL;
    if (bytes < 0 || row < 1 || bytes % row)
        return PyErr_Format(PyExc_ValueError, "the number of bytes has to be a multiple of the bytes of a row");
    const char *from = (const char *)(uintptr_t)source, *end = from + bytes;
    const int64_t *index = (const int64_t *)(uintptr_t)rows;
    uint64_t *sums = (uint64_t *)(uintptr_t)totals;
    size_t left = (size_t)row; /* bytes of the current row */
    Py_BEGIN_ALLOW_THREADS
    while (from < end) {
        size_t size = (size_t)(end - from) < PAGE ? (size_t)(end - from) : PAGE, part;
        if (size == PAGE)
            *sums++ = sum_of_page(from);
        for (; size; size -= part, from += part) {
            part = size < left ? size : left;
            if (*index >= 0)
                copy_past_cache((char *)(uintptr_t)destination + *index * stride + (row - (Py_ssize_t)left), from, part);
            left -= part;
            if (!left) {
                left = (size_t)row;
                index++;
            }
        }
    }
#ifdef HAS_VECTORS
    _mm_sfence();
#endif
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static const double *doubles_of(PyObject *bytes, Py_ssize_t *count) {
    *count = PyBytes_Size(bytes) / (Py_ssize_t)sizeof(double);
    return (const double *)PyBytes_AsString(bytes);
}

/* The numbers of a statistic of all rows; NULL if there is none. */
static const double *rows_of(const Py_buffer *numbers, double statistic) {
    if (numbers->ndim != 2 || !(statistic >= 0 && statistic < (double)numbers->shape[0]))
        return NULL;
    return (const double *)numbers->buf + (Py_ssize_t)statistic * numbers->shape[1];
}

/* Whether numbers, float64 [statistics, rows], are within bounds: for some statistics, the index, a count, as many lowest numbers, and as
   many highest ones. The count is 1 if all rows have the same. NaN is within. */
static int numbers_are_within(const Py_buffer *numbers, PyObject *bounds) {
    Py_ssize_t left, rows = numbers->ndim == 2 ? numbers->shape[1] : 0;
    const double *at = doubles_of(bounds, &left), *end = at + left;
    while (at < end) {
        const double *x = end - at > 3 ? rows_of(numbers, at[0]) : NULL;
        const Py_ssize_t count = x && at[1] == 1 ? 1 : rows;
        const double *low = at + 2, *high = low + count;
        int outside = 0;
        if (!x || at[1] != (double)count || end - low < 2 * count)
            return 0;
        if (count == 1)
            for (Py_ssize_t i = 0; i < rows; i++)
                outside |= (x[i] < *low) | (x[i] > *high);
        else
            for (Py_ssize_t i = 0; i < rows; i++)
                outside |= (x[i] < low[i]) | (x[i] > high[i]);
        if (outside)
            return 0;
        at = high + count;
    }
    return 1;
}

/* Whether the metrics of some names are between their limits, or have no value. NaN is not within. Returns -1 with an exception.
   The first name is that of the loss. */
static int metrics_are_within(PyObject *metrics, PyObject *names, PyObject *limits, double *loss) {
    Py_ssize_t length;
    const Py_ssize_t count = PyTuple_Size(names);
    const double *low = doubles_of(limits, &length), *high = low + count;
    int within = length == 2 * count;
    for (Py_ssize_t i = 0; within == 1 && i < count; i++) {
        PyObject *name = PyTuple_GetItem(names, i), *value;
        if (PyDict_Check(metrics)) {
            value = PyDict_GetItemWithError(metrics, name);
            Py_XINCREF(value);
        } else /* it waits for values on a device */
            value = PyObject_CallMethod(metrics, "get", "O", name);
        if (value && value != Py_None) {
            const double x = PyFloat_AsDouble(value);
            within = low[i] <= x && x <= high[i];
            *loss = i ? *loss : x;
        }
        Py_XDECREF(value);
        if (PyErr_Occurred())
            within = -1;
    }
    return within;
}

/* Writes the loss of a step and some statistics of all rows at an index of steps. Returns -1 with an exception set. */
static int write_step(const Py_buffer *numbers, PyObject *kept, double loss, PyObject *steps, Py_ssize_t at) {
    Py_ssize_t count;
    const double *statistics = doubles_of(kept, &count), *x = statistics;
    const Py_ssize_t rows = numbers->ndim == 2 ? numbers->shape[1] : 0, width = 1 + count * rows;
    double *to = (double *)PyByteArray_AsString(steps) + at * width;
    if (at < 0 || PyByteArray_Size(steps) / (Py_ssize_t)sizeof loss / width <= at)
        x = NULL;
    else
        *to++ = loss;
    for (Py_ssize_t i = 0; x && i < count; i++, to += rows)
        if ((x = rows_of(numbers, statistics[i])))
            memcpy(to, x, (size_t)rows * sizeof *x);
    if (!x)
        PyErr_SetString(PyExc_IndexError, "there is no such statistic or step");
    return x ? 1 : -1;
}

static PyObject *keep_step(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    Py_buffer numbers;
    PyObject *bounds, *kept, *limits, *names, *steps;
    double loss = NAN;
    (void)self;
    if (given != 5 || !PyArg_ParseTuple(args[0], "SSSO!Y", &bounds, &kept, &limits, &PyTuple_Type, &names, &steps))
        return given == 5 ? NULL : PyErr_Format(PyExc_TypeError, "keep_step takes five arguments");
    const Py_ssize_t at = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &numbers, PyBUF_C_CONTIGUOUS))
        return NULL;
    int within = metrics_are_within(args[3], names, limits, &loss);
    if (within == 1 && (within = numbers_are_within(&numbers, bounds)))
        within = write_step(&numbers, kept, args[4] == Py_True ? loss : NAN, steps, at);
    PyBuffer_Release(&numbers);
    return within < 0 ? NULL : PyBool_FromLong(within);
}

/* The operations of a program; see `formulas.py`. */
enum { COLUMN, CONSTANT, STORE, ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATE, ABSOLUTE, ROOT, SQUARE, LESS, SELECT, OPERATIONS };
enum { MAX_OPERATIONS = 512, ROWS = 8 };
typedef struct {
    double code, a, b, c;
} Operation;

/* Whether the operands of an operation are results of earlier ones, and its columns and results exist. */
static int is_valid(const Operation *o, Py_ssize_t before, Py_ssize_t width, Py_ssize_t results) {
    const double operands[] = {o->a, o->b, o->c};
    const int code = o->code >= 0 && o->code < OPERATIONS ? (int)o->code : OPERATIONS;
    const int count = code == STORE ? 1 : code < STORE ? 0 : 3; /* unused ones are 0 */
    for (int i = 0; i < count; i++)
        if (!(operands[i] >= 0 && operands[i] < (double)before))
            return 0;
    return code == COLUMN ? o->a >= 0 && o->a < (double)width : code == STORE ? o->b >= 0 && o->b < (double)results : code < OPERATIONS;
}

#define EACH(EXPRESSION)                                                                                               \
    for (int i = 0; i < ROWS; i++)                                                                                     \
        result[i] = (EXPRESSION);                                                                                      \
    break;

/* Applies a program to each row: float64 [rows, width] to [results, rows]. */
static PyObject *evaluate(PyObject *self, PyObject *args) {
    Py_buffer program, numbers, stored;
    Py_ssize_t width;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*nw*", &program, &numbers, &width, &stored))
        return NULL;
    const Py_ssize_t rows = width > 0 ? numbers.len / (Py_ssize_t)sizeof(double) / width : 0;
    const Py_ssize_t count = program.len / (Py_ssize_t)sizeof(Operation);
    const Py_ssize_t results = rows ? stored.len / (Py_ssize_t)sizeof(double) / rows : 0;
    const Operation *operations = program.buf;
    int valid = count <= MAX_OPERATIONS;
    for (Py_ssize_t at = 0; valid && rows && at < count; at++)
        valid = is_valid(operations + at, at, width, results);
    for (Py_ssize_t start = 0; valid && start < rows; start += ROWS) {
        const Py_ssize_t size = rows - start < ROWS ? rows - start : ROWS;
        double values[MAX_OPERATIONS][ROWS];
        for (Py_ssize_t at = 0; at < count; at++) {
            const Operation *o = operations + at;
            const int code = (int)o->code;
            const double *a = values[code >= STORE ? (int)o->a : 0], *b = values[code > STORE ? (int)o->b : 0];
            const double *c = values[code > STORE ? (int)o->c : 0];
            double *result = values[at];
            switch (code) {
            case COLUMN:
                for (Py_ssize_t i = 0; i < ROWS; i++)
                    result[i] = i < size ? ((const double *)numbers.buf)[(start + i) * width + (Py_ssize_t)o->a] : 0.0;
                break;
            case CONSTANT: EACH(o->a)
            case STORE:
                memcpy((double *)stored.buf + (Py_ssize_t)o->b * rows + start, a, (size_t)size * sizeof *a);
                break;
            case ADD: EACH(a[i] + b[i])
            case SUBTRACT: EACH(a[i] - b[i])
            case MULTIPLY: EACH(a[i] * b[i])
            case DIVIDE: EACH(a[i] / b[i])
            case NEGATE: EACH(-a[i])
            case ABSOLUTE: EACH(fabs(a[i]))
            case ROOT: EACH(sqrt(a[i]))
            case SQUARE: EACH(a[i] * a[i])
            case LESS: EACH(a[i] < b[i])
            default: EACH(a[i] != 0 ? b[i] : c[i])
            }
        }
    }
    PyBuffer_Release(&program);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&stored);
    if (!valid)
        return PyErr_Format(PyExc_ValueError, "not a program for rows of %zd numbers", width);
    Py_RETURN_NONE;
}

/* Adds the sum of bits to `sum_of_bits`, and what is lost to `cast`, unless they are NULL. With a cast, and for 16-bit elements, which are
   widened, all is done chunk by chunk: only the first loop over a chunk waits for the memory. The other sums stay bit-identical. */
static Moments moments_of(const void *memory, size_t count, int kind, double shift, int with_l1, uint64_t *sum_of_bits, Cast *cast) {
    Moments m = {.low = INFINITY, .high = -INFINITY};
    const size_t item = (size_t)item_sizes[kind], step = item == 2 || cast ? CHUNK : count;
    for (size_t start = 0; start < count; start += step) {
        const size_t size = count - start < step ? count - start : step;
        const char *piece = (const char *)memory + start * item;
        size_t at = 0; /* the first element whose bits are not in the sum */
        if (item > 2) {
            kernels[sum_of_bits != NULL][kind == FLOAT64](memory, start, start + size, shift, with_l1, &m, sum_of_bits);
            at = size - size % TILE;
            if (sum_of_bits)
                *sum_of_bits += bits_of(piece + at * item, (size - at) * item, item, (start + at) / TILE);
        } else {
            float values[CHUNK] ALIGNED;
            for (; at < size; at += TILE) {
                const size_t part = size - at < TILE ? size - at : TILE;
                (kind == BFLOAT16 ? widen_bfloat16 : widen_float16)((const uint16_t *)piece + at, part, values + at);
                if (sum_of_bits)
                    *sum_of_bits += bits_of(piece + at * item, part * item, item, (start + at) / TILE);
            }
            kernels[0][0](values, 0, size, shift, with_l1, &m, NULL);
        }
        if (cast)
            add_to_cast(cast, memory, start + size);
    }
    return m;
}

/* Whether the squares of elements up to this magnitude neither overflow nor underflow. */
static int squares_are_exact(int kind, double largest) {
    return kind != FLOAT64 || largest == 0.0 || (SMALLEST <= largest && largest <= LARGEST);
}

/* Writes the bits too if they are requested, but not the form. Returns false if squares overflow or underflow. */
static int write_sums(const void *memory, size_t count, int kind, int further, double *row, Cast *cast) {
    uint64_t sum_of_bits = 0;
    const int with_magnitudes = further & WITH_MAGNITUDES;
    const Moments m = moments_of(memory, count, kind, 0.0, with_magnitudes, further & WITH_BITS ? &sum_of_bits : NULL, cast);
    if (further & WITH_BITS) {
        row[BITS_LOW] = (double)(sum_of_bits & LOW_HALF);
        row[BITS_HIGH] = (double)(sum_of_bits >> 32);
    }
    for (int i = 0; i < SUMS; i++)
        row[i] = NAN;
    row[NUMEL] = (double)count;
    row[FINITE] = (double)m.n;
    row[NANS] = (double)m.nan;
    row[ZEROS] = (double)m.zeros;
    if (!m.n)
        return 1;
    const double n = (double)m.n;
    double mean = m.sum / n, spread = m.squares - m.sum * mean;
    if (!squares_are_exact(kind, -m.low > m.high ? -m.low : m.high))
        return 0;
    if (m.low == m.high) {
        mean = m.low;
        spread = 0.0;
    } else if (mean * m.sum > CANCELLATION * spread) {
        const Moments centered = moments_of(memory, count, kind, mean, 0, NULL, NULL);
        mean += centered.sum / n;
        spread = centered.squares - centered.sum * centered.sum / n;
    }
    row[LOW] = m.low;
    row[HIGH] = m.high;
    row[MEAN] = mean;
    row[DEVIATIONS] = spread > 0.0 ? spread : 0.0;
    row[UNIT] = 1.0;
    if (with_magnitudes)
        row[MAGNITUDES] = m.l1;
    return 1;
}

/* Keeps the global interpreter lock for small tensors. */
static int write_sums_unlocked(const void *memory, size_t count, int kind, int further, double *row, Cast *cast) {
    int done;
    if (count <= SMALL)
        return write_sums(memory, count, kind, further, row, cast);
    Py_BEGIN_ALLOW_THREADS
    done = write_sums(memory, count, kind, further, row, cast);
    Py_END_ALLOW_THREADS
    return done;
}

static PyObject *sums(PyObject *self, PyObject *args) {
    unsigned long long address;
    Py_ssize_t count;
    int kind, further;
    double row[ALL_SUMS];
    PyObject *tuple = NULL;
    Cast cast;
    (void)self;
    if (!PyArg_ParseTuple(args, "Knii|O!", &address, &count, &kind, &further, &PyTuple_Type, &tuple) ||
        (tuple && !read_cast(tuple, kind, &cast)))
        return NULL;
    if (kind < FLOAT32 || kind > FLOAT16 || count < 0)
        return PyErr_Format(PyExc_ValueError, "kind has to be 0 to 3, and count 0 or more");
    if (!write_sums_unlocked((const void *)(uintptr_t)address, (size_t)count, kind, further, row, tuple ? &cast : NULL))
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)row, (further & WITH_BITS ? FORM : SUMS) * (Py_ssize_t)sizeof *row);
}

/* The structures of DLPack 1, https://dmlc.github.io/dlpack/latest/c_api.html. */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *export_managed, *import_managed;
    int (*describe)(void *tensor, DLTensor *out); /* without a new reference; may be NULL */
    int (*current_stream)(int device_type, int32_t device_id, void **stream);
} ExchangeAPI;

enum { CPU = 1, FLOAT = 2, BFLOAT = 4 };

static int (*describe)(void *tensor, DLTensor *out);
static int (*current_stream)(int device_type, int32_t device_id, void **stream);
static PyObject *tensor_class, *parameter_class, *is_neg;

static PyObject *connect(PyObject *self, PyObject *args) {
    PyObject *tensor, *parameter, *capsule;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO", &tensor, &parameter, &capsule))
        return NULL;
    const ExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api)
        return NULL;
    if (api->major != 1 || !api->describe)
        Py_RETURN_FALSE;
    PyObject *method = PyObject_GetAttrString(tensor, "is_neg");
    if (!method)
        return NULL;
    describe = api->describe;
    current_stream = api->current_stream;
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    Py_XDECREF(tensor_class);
    Py_XDECREF(parameter_class);
    Py_XDECREF(is_neg);
    tensor_class = tensor;
    parameter_class = parameter;
    is_neg = method;
    Py_RETURN_TRUE;
}

static int is_row_major(const DLTensor *t) {
    int64_t expected = 1;
    int i = t->strides ? t->ndim - 1 : -1;
    for (; i >= 0 && (t->shape[i] == 1 || t->strides[i] == expected); i--)
        expected *= t->shape[i];
    return i < 0;
}

/* Returns the number of elements if they are a contiguous block in any order of the dimensions, otherwise -1. */
static int64_t dense_count(const DLTensor *t) {
    int64_t count = 1, expected;
    int i;
    for (i = 0; i < t->ndim; i++)
        count *= t->shape[i];
    if (count < 2 || is_row_major(t))
        return count;
    for (expected = 1; expected < count;) {
        for (i = 0; i < t->ndim && (t->shape[i] == 1 || t->strides[i] != expected); i++)
            ;
        if (i == t->ndim)
            return -1;
        expected *= t->shape[i];
    }
    return count;
}

/* Whether the memory has the negated numbers, which DLPack does not say. A signal, such as Ctrl-C, can leave an exception set: the code of a
   function mode runs here. */
static int is_negated(PyObject *tensor) {
    PyObject *result = PyObject_CallFunctionObjArgs(is_neg, tensor, NULL);
    const int negated = result != Py_False;
    if (!result && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    Py_XDECREF(result);
    return negated;
}

/* Describes a tensor of a layout, class and dtype that any kernel supports. Returns the number of its elements, otherwise 0, possibly with an
   exception set. */
static size_t describe_on_any_device(PyObject *object, DLTensor *t, int *kind, const void **memory) {
    PyObject *class = (PyObject *)Py_TYPE(object);
    if (!describe || (class != tensor_class && class != parameter_class))
        return 0;
    if (describe(object, t)) {
        PyErr_Clear();
        return 0;
    }
    if (t->dtype.lanes != 1 || !t->data)
        return 0;
    if (t->dtype.code == FLOAT && t->dtype.bits == 32)
        *kind = FLOAT32;
    else if (t->dtype.code == BFLOAT && t->dtype.bits == 16)
        *kind = BFLOAT16;
    else if (t->dtype.code == FLOAT && t->dtype.bits == 64)
        *kind = FLOAT64;
    else if (t->dtype.code == FLOAT && t->dtype.bits == 16)
        *kind = FLOAT16;
    else
        return 0;
    *memory = (const char *)t->data + t->byte_offset;
    const int64_t count = dense_count(t);
    return count > 1 && !is_negated(object) ? (size_t)count : 0;
}

int has_kernel_layout(PyObject *object) {
    DLTensor t;
    int kind;
    const void *memory;
    return describe_on_any_device(object, &t, &kind, &memory) > 0;
}

/* The driver of a device; see `connect_driver`. */
static struct {
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra);
    int (*capture_status)(void *stream, int *status);
    int (*current_device)(int *id);
    long long elements;
} driver;

typedef struct {
    int type, id, kind, kernel;
    void *stream, *function;
    uint64_t partials, arrived; /* addresses */
    unsigned max_programs, threads, shared;
} Launcher;

enum { MEASURE = 1, COMPARE, MEASURE_WITH_BITS };

#define MAX_LAUNCHERS 256
static Launcher launchers[MAX_LAUNCHERS];
static int launcher_count;

static PyObject *connect_driver(PyObject *self, PyObject *args) {
    unsigned long long launch, capture_status, current_device;
    long long elements;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKL", &launch, &capture_status, &current_device, &elements))
        return NULL;
    if (elements < 1)
        return PyErr_Format(PyExc_ValueError, "elements must be at least 1, got %lld", elements);
    driver.elements = elements;
    memcpy(&driver.launch, &(uintptr_t){(uintptr_t)launch}, sizeof driver.launch);
    memcpy(&driver.capture_status, &(uintptr_t){(uintptr_t)capture_status}, sizeof driver.capture_status);
    memcpy(&driver.current_device, &(uintptr_t){(uintptr_t)current_device}, sizeof driver.current_device);
    launcher_count = 0;
    Py_RETURN_NONE;
}

static PyObject *add_launcher(PyObject *self, PyObject *args) {
    unsigned long long stream, function, partials, arrived;
    Launcher new;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiKiiKIIIKK", &new.type, &new.id, &stream, &new.kind, &new.kernel, &function,
                          &new.max_programs, &new.threads, &new.shared, &partials, &arrived))
        return NULL;
    if (new.kind < FLOAT32 || new.kind > FLOAT16 || new.kernel < MEASURE || new.kernel > MEASURE_WITH_BITS || !new.max_programs ||
        !new.threads)
        return PyErr_Format(PyExc_ValueError, "kind must be 0 to 3, kernel 1 to 3, and max programs and threads at least 1");
    if (!driver.launch || launcher_count == MAX_LAUNCHERS) /* `add` returns False for the streams without a launcher */
        Py_RETURN_FALSE;
    new.stream = (void *)(uintptr_t)stream;
    new.function = (void *)(uintptr_t)function;
    new.partials = partials;
    new.arrived = arrived;
    launchers[launcher_count++] = new;
    Py_RETURN_TRUE;
}

/* Returns the launcher of a kernel for tensors on a device; NULL if it cannot be launched. `after` is NULL for one tensor. */
static const Launcher *launcher_of(int kernel, const DLTensor *t, int kind, const void *before, const void *after) {
    void *stream;
    int id = t->device.id, status = 0;
    if (!driver.launch || !current_stream || ((uintptr_t)before | (uintptr_t)after) % 16 ||
        current_stream(t->device.type, t->device.id, &stream))
        return NULL;
    const Launcher *entry = launchers, *end = launchers + launcher_count;
    while (entry != end && (entry->stream != stream || entry->kind != kind || entry->kernel != kernel ||
                            entry->id != t->device.id || entry->type != t->device.type))
        entry++;
    if (entry == end || driver.current_device(&id) || id != t->device.id || driver.capture_status(stream, &status) ||
        status)
        return NULL;
    return entry;
}

/* Launches a kernel, which writes to `results` on the device. Returns false if it fails. */
static int launch(Launcher launcher, const void *before, const void *after, size_t numel, void *results) {
    int64_t count = (int64_t)numel;
    const int64_t programs = (count + driver.elements - 1) / driver.elements;
    const unsigned grid = programs < launcher.max_programs ? (unsigned)programs : launcher.max_programs;
    /* Triton adds up to two parameters for scratch memory, which these kernels do not need. */
    void *no_scratch = NULL, *parameters[8] = {&before, &after};
    void **next = parameters + (launcher.kernel == COMPARE ? 2 : 1);
    *next++ = &launcher.partials;
    *next++ = &launcher.arrived;
    *next++ = &results;
    *next++ = &count;
    *next++ = &no_scratch;
    *next++ = &no_scratch;
    int (*const call)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **) = driver.launch;
    int failed;
    Py_BEGIN_ALLOW_THREADS /* it blocks while the queue of the device is full */
    failed = call(launcher.function, grid, 1, 1, launcher.threads, 1, 1, launcher.shared, launcher.stream, parameters, NULL);
    Py_END_ALLOW_THREADS
    return !failed;
}

#define MAX_BUFFERS 64
#define MAX_DIMENSIONS 64

typedef struct {
    int type, id;
    uint64_t address;
    Py_ssize_t used, rows;
} Buffer;

typedef struct {
    PyObject_HEAD Py_ssize_t width, rows, capacity, dim_count, dims_capacity;
    double *numbers;   /* [capacity, width] */
    int64_t *keys;     /* [capacity, KEYS] */
    int64_t *dims;     /* [dims_capacity] */
    PyObject *moments; /* a list */
    long long step;    /* the number of calls of `take` */
    int is_batching;   /* whether the thread `batch_thread` collects launches */
    unsigned long batch_thread;
    int64_t *batch; /* [batch_capacity, ENTRY] */
    Py_ssize_t batch_count, batch_capacity;
    int buffer_count;
    Buffer buffers[MAX_BUFFERS]; /* on devices, for this step */
} Slab;

enum { SLOT, MOMENT, DIMENSIONS, BUFFER, BUFFER_ROW, KEYS };
enum { DEVICE_TYPE, DEVICE_ID, KIND, ELEMENTS, COUNT, RESULTS, ENTRY };

static int slab_init(Slab *self, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "n", &self->width))
        return -1;
    if (!self->moments)
        self->moments = PyList_New(0);
    return self->moments ? 0 : -1;
}

static void slab_dealloc(Slab *self) {
    PyMem_Free(self->numbers);
    PyMem_Free(self->keys);
    PyMem_Free(self->dims);
    PyMem_Free(self->batch);
    Py_XDECREF(self->moments);
    PyTypeObject *class = Py_TYPE((PyObject *)self);
    freefunc release = (freefunc)PyType_GetSlot(class, Py_tp_free);
    release(self);
    Py_DECREF(class);
}

static int grow(void **memory, Py_ssize_t size) {
    void *larger = PyMem_Realloc(*memory, (size_t)size);
    if (!larger) {
        PyErr_NoMemory();
        return 0;
    }
    *memory = larger;
    return 1;
}

/* Adds a row whose numbers the caller has to write. Returns NULL with an exception set. `ndim` is -1 for no shape. */
static double *slab_row(Slab *self, int64_t slot, PyObject *moment, int64_t ndim, const int64_t *shape) {
    const Py_ssize_t dim_count = self->dim_count + (ndim > 0 ? (Py_ssize_t)ndim : 0);
    if (self->rows == self->capacity) {
        const Py_ssize_t capacity = self->capacity ? 2 * self->capacity : 64;
        if (!grow((void **)&self->numbers, capacity * self->width * (Py_ssize_t)sizeof(double)) ||
            !grow((void **)&self->keys, capacity * KEYS * (Py_ssize_t)sizeof(int64_t)))
            return NULL;
        self->capacity = capacity;
    }
    if (dim_count > self->dims_capacity) {
        if (!grow((void **)&self->dims, 2 * dim_count * (Py_ssize_t)sizeof(int64_t)))
            return NULL;
        self->dims_capacity = 2 * dim_count;
    }
    Py_ssize_t moments = PyList_Size(self->moments);
    if (!moments || PyList_GetItem(self->moments, moments - 1) != moment) {
        if (PyList_Append(self->moments, moment))
            return NULL;
        moments++;
    }
    double *row = self->numbers + self->rows * self->width;
    for (Py_ssize_t i = 0; i < self->width; i++)
        row[i] = NAN;
    int64_t *key = self->keys + self->rows * KEYS;
    key[SLOT] = slot;
    key[MOMENT] = moments - 1;
    key[DIMENSIONS] = ndim;
    key[BUFFER] = key[BUFFER_ROW] = -1;
    for (int64_t i = 0; i < ndim; i++)
        self->dims[self->dim_count++] = shape[i];
    self->rows++;
    return row;
}

static PyObject *slab_set_buffer(Slab *self, PyObject *args) {
    Buffer new = {0};
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "iiKn", &new.type, &new.id, &address, &new.rows))
        return NULL;
    if (new.rows < 0)
        return PyErr_Format(PyExc_ValueError, "a negative number of rows");
    if (self->buffer_count == MAX_BUFFERS)
        return PyErr_Format(PyExc_ValueError, "more than %d buffers", MAX_BUFFERS);
    new.address = address;
    self->buffers[self->buffer_count++] = new;
    Py_RETURN_NONE;
}

static PyObject *slab_begin_batch(Slab *self, PyObject *args) {
    (void)args;
    self->is_batching = 1;
    self->batch_thread = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

/* Adds a launch to the batch. Returns false with an exception set if there is no memory. */
static int add_to_batch(Slab *self, const DLTensor *t, int kind, const void *elements, size_t numel, uint64_t results) {
    if (self->batch_count == self->batch_capacity) {
        const Py_ssize_t capacity = self->batch_capacity ? 2 * self->batch_capacity : 64;
        if (!grow((void **)&self->batch, capacity * ENTRY * (Py_ssize_t)sizeof(int64_t)))
            return 0;
        self->batch_capacity = capacity;
    }
    int64_t *entry = self->batch + ENTRY * self->batch_count++;
    entry[DEVICE_TYPE] = t->device.type;
    entry[DEVICE_ID] = t->device.id;
    entry[KIND] = kind;
    entry[ELEMENTS] = (int64_t)(uintptr_t)elements;
    entry[COUNT] = (int64_t)numel;
    entry[RESULTS] = (int64_t)results;
    return 1;
}

/* Adds a row whose numbers a device writes: all but the first, which is the number of elements. Returns NULL without an exception
   if the tensors are not supported. */
static double *row_on_device(Slab *self, int kernel, int64_t slot, PyObject *moment, const DLTensor *t, int kind,
                             const void *before, const void *after, size_t numel) {
    enum { NUMBERS_OF_EFFECT = 3 };
    int number = 0;
    while (number < self->buffer_count &&
           (self->buffers[number].id != t->device.id || self->buffers[number].type != t->device.type))
        number++;
    if (number == self->buffer_count || self->buffers[number].used == self->buffers[number].rows || t->ndim > MAX_DIMENSIONS)
        return NULL;
    int64_t shape[MAX_DIMENSIONS];
    memcpy(shape, t->shape, (size_t)t->ndim * sizeof *shape); /* another thread may resize the tensor during the launch */
    Buffer *buffer = &self->buffers[number];
    const Py_ssize_t at = buffer->used++; /* another thread may reserve the next one during the launch */
    const uint64_t width = after ? NUMBERS_OF_EFFECT : BITS_HIGH;
    const uint64_t results = buffer->address + (uint64_t)at * width * sizeof(double);
    const long long step = self->step;
    const Launcher *launcher = launcher_of(kernel, t, kind, before, after);
    if (!launcher)
        return NULL;
    if (kernel == MEASURE && self->is_batching && self->batch_thread == PyThread_get_thread_ident()) {
        if (!add_to_batch(self, t, kind, before, numel, results))
            return NULL;
    } else if (!launch(*launcher, before, after, numel, (void *)(uintptr_t)results) || self->step != step)
        return NULL; /* or another thread has called `take` during the launch */
    double *row = slab_row(self, slot, moment, after ? -1 : t->ndim, shape);
    if (row) {
        int64_t *key = self->keys + (self->rows - 1) * KEYS;
        row[0] = (double)numel;
        key[BUFFER] = number;
        key[BUFFER_ROW] = at;
    }
    return row;
}

int add_to_slab(PyObject *slab, PyObject *tensor, long long slot, PyObject *moment, int further) {
    Slab *self = (Slab *)slab;
    DLTensor t;
    int kind;
    const void *memory;
    double numbers[ALL_SUMS];
    const int sum_count = further & WITH_BITS ? ALL_SUMS : SUMS;
    if (self->width < sum_count) {
        PyErr_Format(PyExc_TypeError, "the rows of the slab have %zd numbers, and the sums are %d", self->width, sum_count);
        return -1;
    }
    const size_t numel = describe_on_any_device(tensor, &t, &kind, &memory);
    if (further & WITH_BITS && numel && !is_row_major(&t))
        return 0;
    const int kernel = further & WITH_BITS ? MEASURE_WITH_BITS : MEASURE;
    double *row = numel ? row_on_device(self, kernel, slot, moment, &t, kind, memory, NULL, numel) : NULL;
    if (row && further & WITH_BITS)
        row[FORM] = form_of(kind, t.ndim, t.shape);
    if (row || PyErr_Occurred())
        return row ? 1 : -1;
    if (!numel || t.device.type != CPU || !write_sums_unlocked(memory, numel, kind, further, numbers, NULL))
        return 0;
    row = slab_row(self, slot, moment, t.ndim, t.shape);
    if (!row)
        return -1;
    if (further & WITH_BITS)
        numbers[FORM] = form_of(kind, t.ndim, t.shape);
    memcpy(row, numbers, (size_t)sum_count * sizeof *row);
    return 1;
}

static PyObject *slab_add(Slab *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "Slab.add takes 4 arguments, got %zd", count);
    const long long slot = PyLong_AsLongLong(args[1]);
    const int further = (int)PyLong_AsLong(args[3]);
    const int added = PyErr_Occurred() ? -1 : add_to_slab((PyObject *)self, args[0], slot, args[2], further);
    return added < 0 ? NULL : PyBool_FromLong(added);
}

static PyObject *slab_append(Slab *self, PyObject *args) {
    Py_buffer numbers;
    long long slot;
    PyObject *moment, *shape;
    int64_t dims[MAX_DIMENSIONS], ndim = -1;
    if (!PyArg_ParseTuple(args, "y*LOO", &numbers, &slot, &moment, &shape))
        return NULL;
    if (shape != Py_None) {
        ndim = PySequence_Size(shape);
        if (ndim > MAX_DIMENSIONS)
            PyErr_Format(PyExc_ValueError, "a tensor has at most %d dimensions", MAX_DIMENSIONS);
        for (int64_t i = 0; i < ndim && !PyErr_Occurred(); i++) {
            PyObject *size = PySequence_GetItem(shape, i);
            dims[i] = size ? PyLong_AsLongLong(size) : -1;
            Py_XDECREF(size);
        }
    }
    if (numbers.len > self->width * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "there are more numbers than columns");
    double *row = PyErr_Occurred() ? NULL : slab_row(self, slot, moment, ndim, dims);
    if (row)
        memcpy(row, numbers.buf, (size_t)numbers.len);
    PyBuffer_Release(&numbers);
    return row ? PyLong_FromSsize_t(self->rows - 1) : NULL;
}

static PyObject *bytes_of(const void *memory, Py_ssize_t size) {
    return PyBytes_FromStringAndSize(size ? memory : "", size);
}

static PyObject *slab_end_batch(Slab *self, PyObject *args) {
    (void)args;
    PyObject *batch = bytes_of(self->batch, self->batch_count * ENTRY * (Py_ssize_t)sizeof(int64_t));
    self->is_batching = 0;
    self->batch_count = 0;
    return batch;
}

/* Only the first and the last call can run the garbage collector, and with it other threads, which may add rows. */
static PyObject *slab_take(Slab *self, PyObject *args) {
    (void)args;
    PyObject *no_moments = PyList_New(0);
    PyObject *moments = self->moments;
    PyObject *numbers = PyByteArray_FromStringAndSize(
        (const char *)self->numbers, self->rows * self->width * (Py_ssize_t)sizeof(double)); /* the caller may write to it */
    PyObject *keys = bytes_of(self->keys, self->rows * KEYS * (Py_ssize_t)sizeof(int64_t));
    PyObject *dims = bytes_of(self->dims, self->dim_count * (Py_ssize_t)sizeof(int64_t));
    if (!no_moments || !numbers || !keys || !dims) {
        Py_XDECREF(no_moments);
        Py_XDECREF(numbers);
        Py_XDECREF(keys);
        Py_XDECREF(dims);
        return NULL;
    }
    self->rows = self->dim_count = 0;
    self->buffer_count = 0;
    self->step++;
    self->moments = no_moments;
    return Py_BuildValue("(NNNN)", numbers, keys, dims, moments);
}

static Py_ssize_t slab_length(PyObject *self) { return ((Slab *)self)->rows; }

/* How many elements differ between two tensors, and the sums of the squares of both over their finite elements. */
typedef struct {
    int64_t changed, n[2];
    double squares[2];
    int is_outside; /* whether any element is not finite, or equals a bound */
} Effect;

#define GIVEN(was, is) (is)
#define CLIPPED(was, is) ((was) < low ? low : (was) > high ? high : (was))

/* AFTER is GIVEN, or CLIPPED, which ignores the second tensor. */
#define EFFECT(NAME, ELEMENT, VALUE, READ, AFTER)                                                                     \
    static void NAME##_slowly(const ELEMENT *before, const ELEMENT *after, size_t count, VALUE low, VALUE high,       \
                              Effect *e) {                                                                            \
        (void)after;                                                                                                  \
        for (size_t i = 0; i < count; i++) {                                                                          \
            const VALUE was = READ(before[i]), is = AFTER(was, READ(after[i]));                                       \
            const double both[] = {was, is};                                                                          \
            e->changed += was != is && !(isnan(was) && isnan(is));                                                    \
            e->is_outside |= !isfinite(was) || was == low || was == high;                                             \
            for (int k = 0; k < 2; k++)                                                                               \
                if (isfinite(both[k])) {                                                                              \
                    e->n[k]++;                                                                                        \
                    e->squares[k] += both[k] * both[k];                                                               \
                }                                                                                                     \
        }                                                                                                             \
    }                                                                                                                 \
                                                                                                                      \
    FOR_EACH_PROCESSOR                                                                                                \
    static void NAME(const ELEMENT *before, const ELEMENT *after, size_t count, double lower, double upper,           \
                     Effect *e) {                                                                                     \
        const VALUE low = (VALUE)lower, high = (VALUE)upper;                                                          \
        for (size_t start = 0; start < count; start += CHUNK) {                                                       \
            const ELEMENT *old = before + start, *new = after + start;                                                \
            const size_t size = count - start < CHUNK ? count - start : CHUNK;                                        \
            const size_t whole = size - size % LANES;                                                                 \
            double first[LANES] = {0}, second[LANES] = {0}, total = 0.0;                                              \
            int32_t changed[LANES] = {0}, at_bound[LANES] = {0};                                                      \
            for (size_t i = 0; i < whole; i += LANES) {                                                               \
                PREFETCH(old + i + AHEAD);                                                                            \
                PREFETCH(new + i + AHEAD);                                                                            \
                for (int j = 0; j < LANES; j++) {                                                                     \
                    const VALUE was = READ(old[i + j]), is = AFTER(was, READ(new[i + j]));                            \
                    first[j] += (double)was * (double)was;                                                            \
                    second[j] += (double)is * (double)is;                                                             \
                    changed[j] += was != is;                                                                          \
                    at_bound[j] |= (was == low) | (was == high);                                                      \
                }                                                                                                     \
            }                                                                                                         \
            for (int j = 0; j < LANES; j++)                                                                           \
                total += first[j] + second[j];                                                                        \
            if (!isfinite(total)) {                                                                                   \
                NAME##_slowly(old, new, size, low, high, e);                                                          \
                continue;                                                                                             \
            }                                                                                                         \
            for (int j = 0; j < LANES && whole; j++) {                                                                \
                e->squares[0] += first[j];                                                                            \
                e->squares[1] += second[j];                                                                           \
                e->changed += changed[j];                                                                             \
                e->is_outside |= at_bound[j];                                                                         \
            }                                                                                                         \
            e->n[0] += whole;                                                                                         \
            e->n[1] += whole;                                                                                         \
            NAME##_slowly(old + whole, new + whole, size - whole, low, high, e);                                      \
        }                                                                                                             \
    }

EFFECT(effect_of_float32, float, float, AS_IT_IS, GIVEN)
EFFECT(effect_of_bfloat16, uint16_t, float, from_bfloat16, GIVEN)
EFFECT(effect_of_float64, double, double, AS_IT_IS, GIVEN)
EFFECT(clip_of_float32, float, float, AS_IT_IS, CLIPPED)
EFFECT(clip_of_bfloat16, uint16_t, float, from_bfloat16, CLIPPED)
EFFECT(clip_of_float64, double, double, AS_IT_IS, CLIPPED)

/* `after` is NULL for the clamped elements of `before`. Returns false if squares have overflowed or underflowed. */
static int write_effect(const void *before, const void *after, size_t count, int kind, double low, double high,
                        int *is_inside, double *out) {
    Effect e = {0};
    if (after)
        OF_KIND(effect, before, after, count, low, high, &e);
    else
        OF_KIND(clip, before, before, count, low, high, &e);
    *is_inside = !e.is_outside;
    out[0] = (double)e.changed;
    for (int i = 0; i < 2; i++) {
        /* Within these limits, no square has overflowed, and those that have underflowed do not matter. */
        if (kind == FLOAT64 && e.n[i] &&
            !(SMALLEST * SMALLEST * (double)e.n[i] <= e.squares[i] && e.squares[i] <= LARGEST * LARGEST))
            return 0;
        out[1 + i] = e.n[i] ? sqrt(e.squares[i]) : NAN;
    }
    return 1;
}

static int write_effect_unlocked(const void *before, const void *after, size_t count, int kind, double low,
                                 double high, int *is_inside, double *out) {
    int done;
    if (count <= SMALL)
        return write_effect(before, after, count, kind, low, high, is_inside, out);
    Py_BEGIN_ALLOW_THREADS
    done = write_effect(before, after, count, kind, low, high, is_inside, out);
    Py_END_ALLOW_THREADS
    return done;
}

/* Two tensors whose elements are compared in the order of memory. */
typedef struct {
    DLTensor t;
    int kind;
    const void *before, *after;
    size_t numel; /* 0 if they are not supported */
} Pair;

static Pair pair_of(PyObject *before, PyObject *after) {
    Pair pair = {0};
    DLTensor other;
    int kind;
    const size_t numel = describe_on_any_device(before, &pair.t, &pair.kind, &pair.before);
    if (!numel || describe_on_any_device(after, &other, &kind, &pair.after) != numel || kind != pair.kind ||
        pair.t.ndim != other.ndim || pair.t.device.type != other.device.type || pair.t.device.id != other.device.id)
        return pair;
    for (int i = 0; i < other.ndim; i++)
        if (pair.t.shape[i] != other.shape[i] || (other.shape[i] != 1 && pair.t.strides[i] != other.strides[i]))
            return pair;
    pair.numel = numel;
    return pair;
}

/* Compares two tensors on the CPU. Returns false if they are not supported. */
static int compare(const Pair *pair, double *numbers) {
    int is_inside;
    return pair->numel && pair->t.device.type == CPU && pair->kind != FLOAT16 &&
           write_effect_unlocked(pair->before, pair->after, pair->numel, pair->kind, 0.0, 0.0, &is_inside, numbers);
}

static PyObject *effect(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    double numbers[3];
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "effect takes two arguments");
    const Pair pair = pair_of(args[0], args[1]);
    if (!compare(&pair, numbers))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return Py_BuildValue("[ddd]", numbers[0], numbers[1], numbers[2]);
}

double number_or_nan(PyObject *object) { return object == Py_None ? NAN : PyFloat_AsDouble(object); }

int add_effect_to_slab(PyObject *slab, PyObject *before, PyObject *after, long long slot, PyObject *moment, double factor, double held) {
    enum { EFFECT = 6 };
    Slab *self = (Slab *)slab;
    double numbers[3];
    if (self->width < EFFECT) {
        PyErr_SetString(PyExc_TypeError, "the rows of the slab are too narrow for effects");
        return -1;
    }
    const Pair pair = pair_of(before, after);
    double *row = NULL;
    if (pair.numel)
        row = row_on_device(self, COMPARE, slot, moment, &pair.t, pair.kind, pair.before, pair.after, pair.numel);
    if (!row && !PyErr_Occurred()) {
        if (!compare(&pair, numbers))
            return 0;
        row = slab_row(self, slot, moment, -1, NULL);
        if (row)
            memcpy(row + 1, numbers, sizeof numbers);
    }
    if (!row)
        return -1;
    row[0] = (double)pair.numel;
    row[4] = factor;
    row[5] = held;
    return 1;
}

static PyObject *slab_add_effect(Slab *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "Slab.add_effect takes 6 arguments, got %zd", count);
    const long long slot = PyLong_AsLongLong(args[2]);
    const double factor = number_or_nan(args[4]), held = number_or_nan(args[5]);
    const int added = PyErr_Occurred() ? -1 : add_effect_to_slab((PyObject *)self, args[0], args[1], slot, args[3], factor, held);
    return added > 0 ? PyLong_FromSsize_t(self->rows - 1) : added ? NULL : Py_NewRef(Py_None);
}

static PyObject *effect_of_clip(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    DLTensor t;
    int kind, is_inside;
    double numbers[3];
    const void *memory;
    (void)self;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "effect_of_clip takes three arguments");
    const double low = args[1] == Py_None ? -INFINITY : PyFloat_AsDouble(args[1]);
    const double high = args[2] == Py_None ? INFINITY : PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const size_t numel = low <= high ? describe_on_any_device(args[0], &t, &kind, &memory) : 0;
    if (!numel || t.device.type != CPU || kind == FLOAT16 ||
        !write_effect_unlocked(memory, NULL, numel, kind, low, high, &is_inside, numbers))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return Py_BuildValue("O[ddd]", is_inside ? Py_True : Py_False, numbers[0], numbers[1], numbers[2]);
}

static PyMethodDef slab_methods[] = {
    {"add", (PyCFunction)(void (*)(void))slab_add, METH_FASTCALL, "add(tensor, slot, moment, further) -> bool"},
    {"add_effect", (PyCFunction)(void (*)(void))slab_add_effect, METH_FASTCALL,
     "add_effect(before, after, slot, moment, factor, held) -> int or None"},
    {"set_buffer", (PyCFunction)slab_set_buffer, METH_VARARGS, "set_buffer(device type, device id, address, rows) -> None"},
    {"begin_batch", (PyCFunction)slab_begin_batch, METH_NOARGS, "begin_batch() -> None"},
    {"end_batch", (PyCFunction)slab_end_batch, METH_NOARGS, "end_batch() -> bytes"},
    {"append", (PyCFunction)slab_append, METH_VARARGS, "append(numbers, slot, moment, shape) -> int"},
    {"take", (PyCFunction)slab_take, METH_NOARGS, "take() -> (numbers, keys, dims, moments)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slab_slots[] = {
    {Py_tp_doc, "The sums of the tensors of a step."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, slab_init},
    {Py_tp_dealloc, slab_dealloc},
    {Py_tp_methods, slab_methods},
    {Py_sq_length, slab_length},
    {0, NULL},
};

static PyType_Spec slab_spec = {
    .name = "instrument.stats.native.Slab",
    .basicsize = sizeof(Slab),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slab_slots,
};

PyTypeObject *slab_type;

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
                const double last = bins - 1, up = at < last ? at : last, bin = up > 0.0 ? up : 0.0;                  \
                part[i] = inside ? (int32_t)bin : bins;                                                               \
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
    if (kind < 0 || kind > 2 || count < 0 || bins < 1 || bins > MAX_BINS)
        return PyErr_Format(PyExc_ValueError, "kind has to be 0, 1 or 2, count 0 or more, and bins 1 to 65536");
    const void *memory = (const void *)(uintptr_t)address;
    int64_t *totals = (int64_t *)(uintptr_t)result;
    int64_t *counts = PyMem_Calloc((size_t)(bins + 1) * TURNS, sizeof *counts);
    if (!counts)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    OF_KIND(bins, memory, (size_t)count, low, high, bins, counts);
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i < bins; i++)
            totals[i] += counts[turn * (bins + 1) + i];
    Py_END_ALLOW_THREADS
    PyMem_Free(counts);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "connect(tensor class, parameter class, exchange API) -> bool"},
    {"connect_driver", connect_driver, METH_VARARGS,
     "connect_driver(launch, capture status, current device, elements) -> None"},
    {"add_launcher", add_launcher, METH_VARARGS,
     "add_launcher(device type, device id, stream, kind, kernel, function, max programs, threads, shared memory, partials, arrived) -> bool"},
    {"effect", (PyCFunction)(void (*)(void))effect, METH_FASTCALL, "effect(before, after) -> list or None"},
    {"effect_of_clip", (PyCFunction)(void (*)(void))effect_of_clip, METH_FASTCALL,
     "effect_of_clip(tensor, low, high) -> (is_inside, list) or None"},
    {"sums", sums, METH_VARARGS,
     "sums(address, count, kind, further[, cast: (length, inner, scale, numbers, errors, mantissa, least, largest, block, scales)]) -> bytes or None"},
    {"bits", bits, METH_VARARGS, "bits(address, bytes, bytes of an element) -> int"},
    {"copy_rows", copy_rows, METH_VARARGS,
     "copy_rows(source, bytes, bytes of a row, destination, bytes between two rows, indices, sums) -> None"},
    {"evaluate", evaluate, METH_VARARGS, "evaluate(program, numbers, width, results) -> None"},
    {"keep_step", (PyCFunction)(void (*)(void))keep_step, METH_FASTCALL,
     "keep_step((bounds, kept, limits, names, steps), at, numbers, metrics, is_training) -> bool"},
    {"histogram", histogram, METH_VARARGS, "histogram(address, count, kind, low, high, bins, counts) -> None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "native", "Statistics and histograms of floats, each in one pass over memory.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native(void) {
    choose_kernels();
    PyObject *created = PyModule_Create(&module);
    slab_type = created ? (PyTypeObject *)PyType_FromSpec(&slab_spec) : NULL;
    if (!slab_type || PyModule_AddObjectRef(created, "Slab", (PyObject *)slab_type) || add_plain_calls(created))
        Py_CLEAR(created);
    return created;
}
