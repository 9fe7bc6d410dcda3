/* Unpacks one row of a packed table to floats, for the compiled loops. */

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

/* An element: a code or a float. */
static inline int are_bits(int64_t bits) { return bits == 2 || bits == 4 || bits == 8 || bits == 16 || bits == 32; }

/* Bytes of a row, without padding. */
static inline int64_t stored_bytes(int64_t width, int64_t bits) {
    return (bits < 16 ? QPARAM_BYTES : 0) + (width * bits + 7) / 8;
}

/* `width` and `bits` of a table, as constants where the caller has them: then a row's sum stays in registers. */
INLINE static void add_row(const uint8_t *row, int64_t width, int64_t bits, float *restrict sum) {
    if (bits == 32) {
        for (int64_t i = 0; i < width; i++) {
            float value;
            memcpy(&value, row + 4 * i, 4);
            sum[i] += value;
        }
        return;
    }
    if (bits == 16) {
        for (int64_t i = 0; i < width; i++) {
            uint16_t half;
            memcpy(&half, row + 2 * i, 2);
            sum[i] += from_half(half);
        }
        return;
    }
    uint16_t half_scale, half_bias;
    memcpy(&half_scale, row, 2);
    memcpy(&half_bias, row + 2, 2);
    const float scale = one_from_half(half_scale), bias = one_from_half(half_bias);
    const uint8_t *codes = row + QPARAM_BYTES;
    const int per_byte = (int)(8 / bits), shift = (int)bits;
    if (bits == 8) {
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

/* CALL(width, bits, vector) with both as constants where they are common ones: then a row's numbers stay in registers.
   `vector`: room for a row, for other widths. */
#define BY_ROW(CALL, WIDTH, BITS, VECTOR) \
    do { \
        if ((BITS) == 8) { \
            BY_WIDTH(CALL, WIDTH, 8, VECTOR) \
        } else if ((BITS) == 4) { \
            BY_WIDTH(CALL, WIDTH, 4, VECTOR) \
        } else { \
            CALL(WIDTH, BITS, VECTOR); \
        } \
    } while (0)
#define BY_WIDTH(CALL, WIDTH, BITS, VECTOR) \
    switch (WIDTH) { \
        FIXED_WIDTH(CALL, 8, BITS) \
        FIXED_WIDTH(CALL, 16, BITS) \
        FIXED_WIDTH(CALL, 32, BITS) \
        FIXED_WIDTH(CALL, 64, BITS) \
        FIXED_WIDTH(CALL, 128, BITS) \
    default: \
        CALL(WIDTH, BITS, VECTOR); \
    }
#define FIXED_WIDTH(CALL, WIDTH, BITS) \
    case WIDTH: { \
        float fixed[WIDTH]; \
        CALL(WIDTH, BITS, fixed); \
        break; \
    }

#endif
