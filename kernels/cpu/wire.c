/* float32 to and from the 16-bit types of the wire, rounded to nearest even: plain integer arithmetic on the bits.

   Half: the three ranges of a magnitude (too small for a normal half, normal, infinite or NaN) are all computed and
   one is chosen, so that the loops have no branch. A magnitude below 2^-14 is rounded by the adder: 0.5 + x has its
   last bit at 2^-24, the step of a half's denormals. */
#include "kernels.h"

#include <string.h>

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define HALF_NORMAL (113u << 23)   /* 2^-14, the least normal half, as a float32 */
#define HALF_OVER (143u << 23)     /* 2^16 */
#define INFINITE (255u << 23)
#define REBIAS ((127u - 15u) << 23)

INLINE uint32_t half_of(uint32_t bits) {
    uint32_t sign = (bits >> 16) & 0x8000u, x = bits & 0x7fffffffu;
    uint32_t small = bits_of(float_of(x) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (x - REBIAS + 0xfffu + ((x >> 13) & 1u)) >> 13;
    uint32_t payload = (x & 0x7fffffu) >> 13;
    uint32_t nan = 0x7c00u | (payload ? payload : 1u);
    uint32_t large = (int32_t)x > (int32_t)INFINITE ? nan : 0x7c00u;
    uint32_t finite = (int32_t)x < (int32_t)HALF_NORMAL ? small : normal;
    return sign | ((int32_t)x < (int32_t)HALF_OVER ? finite : large);
}

INLINE uint32_t float_of_half(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, x = (half & 0x7fffu) << 13;
    uint32_t exponent = x & (0x1fu << 23);
    uint32_t normal = x + REBIAS;
    uint32_t small = bits_of(float_of(x + HALF_NORMAL) - float_of(HALF_NORMAL));
    uint32_t finite = exponent == 0 ? small : normal;
    return sign | (exponent == 0x1fu << 23 ? normal + REBIAS : finite);
}

void shoal_pack_f16(const float *x, uint16_t *out, size_t n) {
    EACH(i, n) out[i] = (uint16_t)half_of(bits_of(x[i]));
}

void shoal_unpack_f16(const uint16_t *x, float *out, size_t n) {
    EACH(i, n) out[i] = float_of(float_of_half(x[i]));
}

void shoal_pack_bf16(const float *x, uint16_t *out, size_t n) {
    EACH(i, n) {
        uint32_t bits = bits_of(x[i]);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        uint32_t nan = (bits >> 16) | 0x40u;
        out[i] = (uint16_t)((int32_t)(bits & 0x7fffffffu) > (int32_t)INFINITE ? nan : rounded);
    }
}

void shoal_unpack_bf16(const uint16_t *x, float *out, size_t n) {
    EACH(i, n) out[i] = float_of((uint32_t)x[i] << 16);
}
