/* The formats of packed rows, and the unpacking of one row to floats, for the compiled loops. */

#ifndef RECINFER_ROW_H
#define RECINFER_ROW_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_half.h"

#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

#define QPARAM_BYTES 4 /* the scale and the bias before the codes */
#define CHUNK 128 /* codes smaller than a byte that are unpacked at a time */

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

/* `width` and `format` of a table, as constants where the caller has them: then a row's sum stays in registers. */
INLINE static void add_row(const uint8_t *row, int64_t width, int64_t format, float *restrict sum) {
    if (format == FP32_ROWS) {
        for (int64_t i = 0; i < width; i++) {
            float value;
            memcpy(&value, row + 4 * i, 4);
            sum[i] += value;
        }
        return;
    }
    if (format == FP16_ROWS) {
        for (int64_t i = 0; i < width; i++) {
            uint16_t half;
            memcpy(&half, row + 2 * i, 2);
            sum[i] += from_half(half);
        }
        return;
    }
    if (format == BF16_ROWS) {
        for (int64_t i = 0; i < width; i++) {
            uint16_t high;
            memcpy(&high, row + 2 * i, 2);
            sum[i] += from_bits((uint32_t)high << 16);
        }
        return;
    }
    uint16_t half_scale, half_bias;
    memcpy(&half_scale, row, 2);
    memcpy(&half_bias, row + 2, 2);
    const float scale = one_from_half(half_scale), bias = one_from_half(half_bias);
    const uint8_t *codes = row + QPARAM_BYTES;
    const int shift = code_bits(format), per_byte = 8 / shift;
    if (format == INT8_ROWS) {
#pragma omp simd /* otherwise the compiler unrolls a constant width to scalar code before it vectorizes */
        for (int64_t i = 0; i < width; i++)
            sum[i] = fmaf((float)codes[i], scale, sum[i] + bias);
        return;
    }
    int32_t whole[CHUNK];
    for (int64_t first = 0; first < width; first += CHUNK) {
        const int64_t count = width - first < CHUNK ? width - first : CHUNK;
        const uint8_t *packed = codes + first / per_byte;
        for (int64_t i = 0; i < (count + per_byte - 1) / per_byte; i++)
            for (int k = 0; k < per_byte; k++)
                whole[per_byte * i + k] = (packed[i] >> (shift * k)) & ((1 << shift) - 1);
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            sum[first + i] = fmaf((float)whole[i], scale, sum[first + i] + bias);
    }
}

/* CALL(width, format, vector) with both as constants where they are common ones: then a row's numbers stay in registers.
   `vector`: room for a row, for other widths. */
#define BY_ROW(CALL, WIDTH, FORMAT, VECTOR) \
    do { \
        if ((FORMAT) == INT8_ROWS) { \
            BY_WIDTH(CALL, WIDTH, INT8_ROWS, VECTOR) \
        } else if ((FORMAT) == INT4_ROWS) { \
            BY_WIDTH(CALL, WIDTH, INT4_ROWS, VECTOR) \
        } else if ((FORMAT) == BF16_ROWS) { \
            BY_WIDTH(CALL, WIDTH, BF16_ROWS, VECTOR) \
        } else { \
            CALL(WIDTH, FORMAT, VECTOR); \
        } \
    } while (0)
#define BY_WIDTH(CALL, WIDTH, FORMAT, VECTOR) \
    switch (WIDTH) { \
        FIXED_WIDTH(CALL, 8, FORMAT) \
        FIXED_WIDTH(CALL, 16, FORMAT) \
        FIXED_WIDTH(CALL, 32, FORMAT) \
        FIXED_WIDTH(CALL, 64, FORMAT) \
        FIXED_WIDTH(CALL, 128, FORMAT) \
    default: \
        CALL(WIDTH, FORMAT, VECTOR); \
    }
#define FIXED_WIDTH(CALL, WIDTH, FORMAT) \
    case WIDTH: { \
        float fixed[WIDTH]; \
        CALL(WIDTH, FORMAT, fixed); \
        break; \
    }

#endif
