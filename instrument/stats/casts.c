/* The errors of a cast to a narrow format, in one pass over memory. `instrument.stats.casts` documents the numbers. */

#include "native.h"
#include <float.h>
#include <math.h>

#define LANES 16
#define TILE 1024 /* elements that are converted to float32 at once, a multiple of each block */
#define LINE 32   /* 16-bit elements of a line of the cache */
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline)) /* into the function of each processor */
#else
#define INLINE inline
#endif
#define INFINITE 0x7f800000u

enum { FINITE, UNDERFLOWS, OVERFLOWS, ERRORS, SQUARES, NUMBERS };
enum { ONE_SCALE, POWERS_OF_TWO, FLOAT8_SCALES }; /* the scales of blocks */

static Format format_of(int mantissa, int least, double largest) {
    const int shift = 23 - mantissa;
    return (Format){shift, bits_of_float((float)ldexp(1.0, least)), (float)ldexp(1.0, least + shift), (float)largest};
}

/* Rounds the magnitude with some bits, half to even. Masks instead of branches are vectorized. The first mask changes no magnitude. It
   separates the sum from a product: a compiler must not fuse both, which would round once instead of twice. */
static inline uint32_t rounded(float magnitude, Format f) {
    const uint32_t bits = bits_of_float(magnitude) & 0x7fffffffu, is_subnormal = 0u - (uint32_t)(bits < f.normal);
    const uint32_t subnormal = bits_of_float((float_of(bits) + f.step) - f.step);
    const uint32_t normal = (bits + (1u << (f.shift - 1)) - 1u + ((bits >> f.shift) & 1u)) & ~((1u << f.shift) - 1u);
    return (subnormal & is_subnormal) | (normal & ~is_subnormal);
}

/* Adds the errors of up to TILE elements, in whole lanes. */
static INLINE void add_lost(const float *x, size_t whole, float scale, double inverse, Format f, double *numbers) {
    const uint32_t largest = bits_of_float(f.largest);
    uint32_t finite = 0, underflows = 0, overflows = 0;
    float magnitudes[TILE], kept[TILE];
    for (size_t i = 0; i < whole; i++) {
        const uint32_t given = bits_of_float(x[i]) & 0x7fffffffu, is_finite = given < INFINITE, bits = given & (0u - is_finite);
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
        const uint32_t bits = bits_of_float(x[i]) & 0x7fffffffu, magnitude = bits & (0u - (uint32_t)(bits < INFINITE));
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

/* Nonzero finite numbers stay nonzero and finite. */
static inline float from_float64(double value) {
    const double magnitude = fabs(value), above = magnitude > 0x1p-149 ? magnitude : 0x1p-149, in_range = above < FLT_MAX ? above : FLT_MAX;
    return (float)(magnitude > 0.0 && magnitude < INFINITY ? in_range : magnitude);
}

/* Returns `count` elements, at most TILE, as float32, with zeros up to a multiple of LANES. The signs of float64 are lost. */
static INLINE const float *tile_of(const void *memory, size_t at, size_t count, int kind, float *tile) {
    if (kind == FLOAT32 && count % LANES == 0)
        return (const float *)memory + at;
    if (kind == FLOAT32)
        memcpy(tile, (const float *)memory + at, count * sizeof *tile);
    else if (kind == BFLOAT16)
        for (size_t i = 0; i < count; i++)
            tile[i] = from_bfloat16(((const uint16_t *)memory)[at + i]);
    else if (kind == FLOAT64)
        for (size_t i = 0; i < count; i++)
            tile[i] = from_float64(((const double *)memory)[at + i]);
    else
        for (size_t i = 0; i < count; i++)
            tile[i] = from_float16(((const uint16_t *)memory)[at + i]);
    for (size_t i = count; i % LANES; i++)
        tile[i] = 0.0f;
    return tile;
}

/* Returns the factor of a block before the cast, and the inverse, for the scale of the tensor. */
static INLINE float scale_of_block(float amax, int scales, Format f, float scale, double *inverse) {
    if (scales == POWERS_OF_TWO) {
        const int exponent = (int)(bits_of_float(amax) >> 23) - (int)(bits_of_float(f.largest) >> 23); /* the bias cancels */
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

static INLINE void add_block(const float *x, size_t whole, const Cast *cast, double *inverse, double *lost) {
    const float factor =
        cast->scales ? scale_of_block(amax_of(x, whole), cast->scales, cast->format, cast->scale, inverse) : cast->scale;
    add_lost(x, whole, factor, *inverse, cast->format, lost);
}

/* Casts a block of `size` elements, which zeros follow up to whole lanes. */
static INLINE void cast_block(Cast *cast, const float *x, size_t size, double *inverse) {
    const size_t whole = (size + LANES - 1) / LANES * LANES;
    double lost[NUMBERS] = {0};
    if (whole == TILE) /* loops of a known length are faster */
        add_block(x, TILE, cast, inverse, lost);
    else if (whole == 32)
        add_block(x, 32, cast, inverse, lost);
    else if (whole == 16)
        add_block(x, 16, cast, inverse, lost);
    else
        add_block(x, whole, cast, inverse, lost);
    lost[FINITE] -= (double)(whole - size);
    for (int i = 0; i < NUMBERS; i++)
        cast->numbers[i] += lost[i];
    if (cast->scales)
        *cast->errors++ = lost[ERRORS] / lost[SQUARES]; /* NaN for a block of zeros */
}

/* Casts blocks whose elements are `inner` elements apart. `inner` neighboring blocks are consecutive in memory, and are cast once their last
   element is available, several at a time. */
static INLINE void add_columns(Cast *cast, const void *memory, size_t end) {
    float tile[TILE], row[TILE];
    const size_t most = TILE / cast->block;
    double inverse = 1.0;
    while (cast->at < end) {
        const size_t left = cast->length - cast->at / cast->inner % cast->length;
        const size_t size = left < cast->block ? left : cast->block, whole = (size + LANES - 1) / LANES * LANES;
        if (end - cast->at < size * cast->inner)
            return;
        for (size_t column = 0; column < cast->inner; column += most) {
            const size_t count = cast->inner - column < most ? cast->inner - column : most;
            memset(tile, 0, count * whole * sizeof *tile);
            for (size_t i = 0; i < size; i++) {
                const float *x = tile_of(memory, cast->at + i * cast->inner + column, count, cast->kind, row);
                for (size_t j = 0; j < count; j++)
                    tile[j * whole + i] = x[j];
            }
            for (size_t j = 0; j < count; j++)
                cast_block(cast, tile + j * whole, size, &inverse);
        }
        cast->at += size * cast->inner;
    }
}

FOR_EACH_PROCESSOR
void add_to_cast(Cast *cast, const void *memory, size_t end) {
    float tile[TILE];
    double inverse = 1.0 / (double)cast->scale;
    const int is_half = cast->kind == BFLOAT16 || cast->kind == FLOAT16;
    if (cast->inner > 1) {
        add_columns(cast, memory, end);
        return;
    }
    while (cast->at < end) {
        const size_t left = cast->length - cast->at % cast->length;
        size_t count = end - cast->at < left ? end - cast->at : left;
        count = count < TILE ? count : TILE;
        if (count < left && !(count -= count % cast->block))
            return;
        for (size_t i = 0; is_half && i < count; i += LINE) /* which are widened next, in the next chunk */
            PREFETCH((const uint16_t *)memory + cast->at + CHUNK + i);
        const float *x = tile_of(memory, cast->at, count, cast->kind, tile);
        for (size_t at = 0; at < count; at += cast->block)
            cast_block(cast, x + at, count - at < cast->block ? count - at : cast->block, &inverse);
        cast->at += count;
    }
}

int read_cast(PyObject *tuple, int kind, Cast *cast) {
    unsigned long long numbers, errors;
    Py_ssize_t length, inner, block;
    int mantissa, least;
    double largest, scale;
    if (!PyArg_ParseTuple(tuple, "nndKKiidni", &length, &inner, &scale, &numbers, &errors, &mantissa, &least, &largest, &block, &cast->scales))
        return 0;
    const int is_block = block > 0 && block % LANES == 0 && TILE % block == 0;
    if (kind < FLOAT32 || kind > FLOAT16 || length < 1 || inner < 1 || mantissa < 1 || mantissa > 22 ||
        (cast->scales ? !is_block : block != 0)) {
        PyErr_SetString(PyExc_ValueError, "kind has to be 0 to 3, length and inner 1 or more, mantissa 1 to 22, and block 16 or 32");
        return 0;
    }
    cast->format = format_of(mantissa, least, largest);
    cast->kind = kind;
    cast->scale = (float)scale;
    cast->block = block ? (size_t)block : TILE;
    cast->length = (size_t)length % cast->block ? (size_t)length : SIZE_MAX; /* then all blocks are whole */
    cast->inner = (size_t)inner;
    cast->at = 0;
    cast->numbers = (double *)(uintptr_t)numbers;
    cast->errors = (double *)(uintptr_t)errors;
    memset(cast->numbers, 0, NUMBERS * sizeof *cast->numbers);
    return 1;
}
