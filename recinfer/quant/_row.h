/* The formats of packed rows, and the unpacking of one row to floats, for the compiled loops. */

#ifndef RECINFER_ROW_H
#define RECINFER_ROW_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_half.h"

/* Functions that convert eight halves by one instruction of x86; GCC 12 does not use it in vectors of its own. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define EIGHT_HALVES __attribute__((target("avx2,f16c")))
#endif

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

#define QPARAM_BYTES 4 /* the scale and the bias before the codes */
#define WIDEST 128     /* columns that a loop of its own adds at a time */
#define BLOCK 8        /* codes smaller than a byte are read so many at a time */

/* How `pack` of _tables.c sends what bags of one feature hold: nothing; the row of each; sums; the rows of some. The same
   numbers stand in proto/recinfer/v1/shards.proto. */
enum { EMPTY = 0, STORED = 1, SUMS = 2, SOME = 3 };

/* A bit for each bag. */
static inline int64_t bits_bytes(int64_t batch) { return (batch + 7) / 8; }

/* Convert one number, by the machine's instruction if it has one. */
static inline float one_from_half(uint16_t half) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
    _Float16 value;
    memcpy(&value, &half, 2);
    return (float)value;
#else
    return from_half(half);
#endif
}

/* The formats of rows: `code` of a recinfer.quant.formats.row_format.RowFormat. */
enum { INT2_ROWS = 1, INT4_ROWS, INT8_ROWS, FP16_ROWS, FP32_ROWS, BF16_ROWS, END_OF_FORMATS };

static inline int is_row_format(int64_t format) { return format >= INT2_ROWS && format < END_OF_FORMATS; }

/* Bits of a code of an integer format; 0 of a format without codes. */
static inline int code_bits(int64_t format) {
    return format == INT8_ROWS ? 8 : format == INT4_ROWS ? 4 : format == INT2_ROWS ? 2 : 0;
}

/* Bytes of a row, without padding. */
static inline int64_t row_size(int64_t width, int64_t format) {
    switch (format) {
    case FP32_ROWS:
        return 4 * width;
    case FP16_ROWS:
    case BF16_ROWS:
        return 2 * width;
    default:
        return QPARAM_BYTES + (width * code_bits(format) + 7) / 8;
    }
}

/* Byte of a row at which a column begins, of which an integer format takes multiples of BLOCK alone. */
static inline int64_t byte_of(int64_t column, int64_t format) {
    return code_bits(format) ? QPARAM_BYTES + column * code_bits(format) / 8 : row_size(column, format);
}

/* Add `width` columns of a row, from `first` on, a multiple of BLOCK. With `width` and `format` as constants the sum stays in
   registers. Without `simd` the compiler unrolls a loop of a constant width to scalar code before it makes vectors. */
INLINE static void add_columns(const uint8_t *row, int64_t first, int64_t width, int64_t format, float *restrict sum) {
    const uint8_t *from = row + byte_of(first, format);
    if (format == FP32_ROWS) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float value;
            memcpy(&value, from + 4 * i, 4);
            sum[i] += value;
        }
        return;
    }
    if (format == FP16_ROWS) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            uint16_t half;
            memcpy(&half, from + 2 * i, 2);
            sum[i] += from_half(half);
        }
        return;
    }
    if (format == BF16_ROWS) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            uint16_t high;
            memcpy(&high, from + 2 * i, 2);
            sum[i] += from_bits((uint32_t)high << 16);
        }
        return;
    }
    uint16_t half_scale, half_bias;
    memcpy(&half_scale, row, 2);
    memcpy(&half_bias, row + 2, 2);
    const float scale = one_from_half(half_scale), bias = one_from_half(half_bias);
    if (format == INT8_ROWS) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++)
            sum[i] = fmaf((float)from[i], scale, sum[i] + bias);
        return;
    }
    const int bits = code_bits(format);
    for (int64_t at = 0; at < width; at += BLOCK, from += bits) { /* BLOCK codes take as many bytes as a code takes bits */
        const int64_t count = width - at < BLOCK ? width - at : BLOCK;
        uint32_t codes = 0;
        memcpy(&codes, from, (size_t)((count * bits + 7) / 8));
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            sum[at + i] = fmaf((float)(int32_t)(codes >> (uint32_t)(bits * i) & ((1u << bits) - 1)), scale, sum[at + i] + bias);
    }
}

/* By vectors: GCC compiles memcpy of so many bytes to a copy by bytes, which starts slowly. `to`: float32, wherever it lies. */
INLINE static void copy_floats(const float *restrict from, int64_t width, uint8_t *restrict to) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++)
        memcpy(to + 4 * i, from + i, 4);
}

#ifdef EIGHT_HALVES
static inline int has_eight_halves(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

/* As add_columns, for FP16_ROWS alone. */
EIGHT_HALVES INLINE static void add_halves(const uint8_t *row, int64_t first, int64_t width, int64_t format,
                                           float *restrict sum) {
    const int64_t whole = width / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8) {
        const __m128i halves = _mm_loadu_si128((const __m128i *)(row + byte_of(first + i, format)));
        _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), _mm256_cvtph_ps(halves)));
    }
    add_columns(row, first + whole, width - whole, format, sum + whole);
}
#endif

/* CALL(first, width, format, vector) for all columns of a row: `format` is a constant, `width` too but for the last few columns;
   `vector` has room for `width` numbers. */
#define BY_ROW(CALL, WIDTH, FORMAT) \
    switch (FORMAT) { \
    case INT2_ROWS: \
        BY_COLUMNS(CALL, WIDTH, INT2_ROWS) \
        break; \
    case INT4_ROWS: \
        BY_COLUMNS(CALL, WIDTH, INT4_ROWS) \
        break; \
    case INT8_ROWS: \
        BY_COLUMNS(CALL, WIDTH, INT8_ROWS) \
        break; \
    case FP16_ROWS: \
        BY_COLUMNS(CALL, WIDTH, FP16_ROWS) \
        break; \
    case FP32_ROWS: \
        BY_COLUMNS(CALL, WIDTH, FP32_ROWS) \
        break; \
    case BF16_ROWS: \
        BY_COLUMNS(CALL, WIDTH, BF16_ROWS) \
        break; \
    }
#define BY_COLUMNS(CALL, WIDTH, FORMAT) \
    for (int64_t first = 0, left = (WIDTH); left > 0; first = (WIDTH) - left) { \
        FIXED_WIDTH(CALL, WIDEST, FORMAT) \
        FIXED_WIDTH(CALL, 64, FORMAT) \
        FIXED_WIDTH(CALL, 32, FORMAT) \
        FIXED_WIDTH(CALL, 16, FORMAT) \
        FIXED_WIDTH(CALL, 8, FORMAT) { \
            float few[8]; \
            CALL(first, left, FORMAT, few); \
            left = 0; \
        } \
    }
#define FIXED_WIDTH(CALL, COLUMNS, FORMAT) \
    if (left >= COLUMNS) { \
        float fixed[COLUMNS]; \
        CALL(first, COLUMNS, FORMAT, fixed); \
        left -= COLUMNS; \
    } else

#endif
