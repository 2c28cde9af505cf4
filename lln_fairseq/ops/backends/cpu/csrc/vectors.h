/* Vectors as wide as the registers of the CPU, and the exponential function. */

#include <math.h>
#include <stdint.h>

/* LANES is the number of floats in a vector. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Return e^x for x <= 0, with a relative error of 1e-7. x is clamped to [-87, 0]: e^-87 is close to the smallest number
   of float32, and x is a difference of large numbers, which rounding may have left slightly above 0. NaN stays NaN. The
   polynomial is taken from expf in the Cephes library. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 0.0f ? 0.0f : x;
    const float n = rintf(x * 1.44269504088896341f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const union { uint32_t i; float f; } power = {((uint32_t)(int32_t)n + 127u) << 23};
    return (p * r * r + r + 1.0f) * power.f;
}
