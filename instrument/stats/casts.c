/* What a cast to a narrow format loses, in one pass over memory. `instrument.stats.casts` documents the numbers. */

#include "native.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define TILE 1024 /* elements that are converted to float32 at once */
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline)) /* into the function of each processor */
#else
#define INLINE inline
#endif
#define INFINITE 0x7f800000u

enum { FINITE, UNDERFLOWS, OVERFLOWS, ERRORS, SQUARES, NUMBERS };
enum { ONE_SCALE, POWERS_OF_TWO, FLOAT8_SCALES }; /* the scales of blocks */

/* A format with `23 - shift` bits of the mantissa. Below the smallest normal number, whose bits are `normal`, adding and subtracting
   `step` rounds to its subnormal numbers. */
typedef struct {
    int shift;
    uint32_t normal;
    float step, largest;
} Format;

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static Format format_of(int mantissa, int least, double largest) {
    const int shift = 23 - mantissa;
    return (Format){shift, bits_of((float)ldexp(1.0, least)), (float)ldexp(1.0, least + shift), (float)largest};
}

/* Rounds the magnitude with some bits, half to even. Masks instead of branches are vectorized. The first mask changes no magnitude. It
   separates the sum from a product: a compiler must not fuse both, which would round once instead of twice. */
static inline uint32_t rounded(float magnitude, Format f) {
    const uint32_t bits = bits_of(magnitude) & 0x7fffffffu, is_subnormal = 0u - (uint32_t)(bits < f.normal);
    const uint32_t subnormal = bits_of((float_of(bits) + f.step) - f.step);
    const uint32_t normal = (bits + (1u << (f.shift - 1)) - 1u + ((bits >> f.shift) & 1u)) & ~((1u << f.shift) - 1u);
    return (subnormal & is_subnormal) | (normal & ~is_subnormal);
}

/* Adds what up to TILE elements lose, in whole lanes. */
static INLINE void add_lost(const float *x, size_t whole, float scale, double inverse, Format f, double *numbers) {
    const uint32_t largest = bits_of(f.largest);
    uint32_t finite = 0, underflows = 0, overflows = 0;
    float magnitudes[TILE], kept[TILE];
    for (size_t i = 0; i < whole; i++) {
        const uint32_t given = bits_of(x[i]) & 0x7fffffffu, is_finite = given < INFINITE, bits = given & (0u - is_finite);
        const uint32_t cast = rounded(float_of(bits) * scale, f);
        finite += is_finite;
        overflows += cast > largest;
        underflows += (uint32_t)(cast == 0) & (uint32_t)(bits != 0);
        magnitudes[i] = float_of(bits);
        kept[i] = float_of(cast < largest ? cast : largest);
    }
    double errors[LANES] = {0}, squares[LANES] = {0};
    for (size_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const double magnitude = magnitudes[i + (size_t)j], lost = magnitude - (double)kept[i + (size_t)j] * inverse;
            errors[j] += lost * lost;
            squares[j] += magnitude * magnitude;
        }
    numbers[FINITE] += finite;
    numbers[UNDERFLOWS] += underflows;
    numbers[OVERFLOWS] += overflows;
    for (int half = LANES / 2; half; half /= 2) /* fewer additions that wait for each other */
        for (int j = 0; j < half; j++) {
            errors[j] += errors[j + half];
            squares[j] += squares[j + half];
        }
    numbers[ERRORS] += errors[0];
    numbers[SQUARES] += squares[0];
}

static INLINE float amax_of(const float *x, size_t count) {
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(x[i]) & 0x7fffffffu, magnitude = bits & (0u - (uint32_t)(bits < INFINITE));
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

/* Returns `count` elements, at most TILE, as float32, with zeros up to a multiple of LANES. */
static INLINE const float *tile_of(const void *memory, size_t at, size_t count, int is_bfloat16, float *tile) {
    if (!is_bfloat16 && count % LANES == 0)
        return (const float *)memory + at;
    if (is_bfloat16)
        for (size_t i = 0; i < count; i++)
            tile[i] = float_of((uint32_t)((const uint16_t *)memory)[at + i] << 16);
    else
        memcpy(tile, (const float *)memory + at, count * sizeof *tile);
    for (size_t i = count; i % LANES; i++)
        tile[i] = 0.0f;
    return tile;
}

/* Returns the factor of a block before the cast, and the inverse, for the scale of the tensor. */
static INLINE float scale_of_block(float amax, int scales, Format f, float scale, double *inverse) {
    if (scales == POWERS_OF_TWO) {
        const int exponent = (int)(bits_of(amax) >> 23) - (int)(bits_of(f.largest) >> 23); /* the bias cancels */
        const float factor = float_of((uint32_t)(127 - (exponent < -127 ? -127 : exponent)) << 23);
        *inverse = 1.0 / (double)factor;
        return factor;
    }
    const Format float8_e4m3fn = {20, 0x3c800000u, 0x1p14f, 448.0f};
    const float wide = float_of(rounded(amax / f.largest * scale, float8_e4m3fn));
    const float stored = wide > float8_e4m3fn.largest ? float8_e4m3fn.largest : wide;
    *inverse = (double)stored / (double)scale;
    return stored > 0.0f ? scale / stored : 0.0f;
}

FOR_EACH_PROCESSOR
static void add_rows(const void *memory, size_t rows, size_t length, int is_bfloat16, Format f, size_t block, int scales,
                     float scale, double *numbers, double *errors) {
    float tile[TILE];
    double inverse = 1.0 / (double)scale;
    for (size_t row = 0; row < rows; row++)
        for (size_t at = 0; at < length; at += block) {
            const size_t size = length - at < block ? length - at : block, whole = (size + LANES - 1) / LANES * LANES;
            const float *x = tile_of(memory, row * length + at, size, is_bfloat16, tile);
            const float factor = scales ? scale_of_block(amax_of(x, whole), scales, f, scale, &inverse) : scale;
            double lost[NUMBERS] = {0};
            add_lost(x, whole, factor, inverse, f, lost);
            lost[FINITE] -= (double)(whole - size);
            for (int i = 0; i < NUMBERS; i++)
                numbers[i] += lost[i];
            if (scales)
                *errors++ = lost[ERRORS] / lost[SQUARES]; /* NaN for a block of zeros */
        }
}

PyObject *lost_by_cast(PyObject *self, PyObject *args) {
    unsigned long long address, result, results;
    Py_ssize_t rows, length, block;
    int is_bfloat16, mantissa, least, scales;
    double largest, scale;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnpdKKiidni", &address, &rows, &length, &is_bfloat16, &scale, &result, &results, &mantissa, &least,
                          &largest, &block, &scales))
        return NULL;
    if (rows < 0 || length < 0 || mantissa < 1 || mantissa > 22 || block < 0 || block > TILE || !scales != !block) {
        PyErr_SetString(PyExc_ValueError, "rows and length have to be 0 or more, mantissa 1 to 22, and block at most 1024");
        return NULL;
    }
    const void *memory = (const void *)(uintptr_t)address;
    double *numbers = (double *)(uintptr_t)result, *errors = (double *)(uintptr_t)results;
    const Format f = format_of(mantissa, least, largest);
    memset(numbers, 0, NUMBERS * sizeof *numbers);
    Py_BEGIN_ALLOW_THREADS
    add_rows(memory, (size_t)rows, (size_t)length, is_bfloat16, f, block ? (size_t)block : TILE, scales, (float)scale, numbers, errors);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
