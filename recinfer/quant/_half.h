/* Half-precision conversion without special instructions, and functions compiled for several vector widths. */

#ifndef RECINFER_HALF_H
#define RECINFER_HALF_H

#include <stdint.h>
#include <string.h>

/* One copy of the loops for each width of vectors; the loader picks the machine's. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* IEEE half precision, rounded to nearest even; without branches, so that loops over it become vectors. */
static inline uint32_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u; /* adding 0.5 rounds at the right place */
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    return sign | (magnitude < 0x47800000u ? half : 0x7c00u); /* 65536 and more: infinity */
}

static inline float from_half(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    uint32_t normal = (magnitude << 13) + 0x38000000u;
    uint32_t subnormal = to_bits(from_bits(magnitude + 0x3f000000u) - 0.5f); /* the mantissa counts units of 2**-24 */
    uint32_t bits = magnitude < 0x400u ? subnormal : normal;
    return from_bits(sign | (magnitude < 0x7c00u ? bits : magnitude << 13 | 0x7f800000u)); /* infinity, or a NaN */
}

#endif
