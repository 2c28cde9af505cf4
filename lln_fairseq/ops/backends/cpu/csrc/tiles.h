/* Tiles of tokens on a CPU: matrix products, softmax, and how a tile is read from and written to (B, H, N, D). */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, PANEL = 4 };
#elif defined(__AVX__)
enum { LANES = 8, PANEL = 2 };
#else
enum { LANES = 4, PANEL = 4 };
#endif
enum { ROWS = 4, MULTIPLE = 16 }; /* a panel of a product is ROWS x PANEL vectors; tiles are padded to 16 tokens */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    float *data;
    int64_t batch, head, token; /* strides in elements; the features are dense */
} view;                         /* (B, H, N, D) */

typedef struct {
    int64_t batch, head, start, count, padded; /* `count` tokens from `start` on; their tile has `padded` rows */
} span;

static inline float *at(const view *x, span s) {
    return x->data + s.batch * x->batch + s.head * x->head + s.start * x->token;
}

/* ---- arithmetic ---- */

/* e^x to 1e-7 for x <= 0, the lowest clamped to the range of float32; NaN stays NaN. What rounding has left above 0,
   where x is a difference of large numbers, counts as 0. The polynomial is that of Cephes' expf. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 0.0f ? 0.0f : x;
    const float n = rintf(x * 1.44269504088896341f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const union { uint32_t i; float f; } power = {((uint32_t)(int32_t)n + 127u) << 23};
    return (p * r * r + r + 1.0f) * power.f;
}

/* Views of which the tile after s is asked for while a product on s keeps the memory idle; NULL follows the last. */
typedef struct {
    span s;
    const view *views[4];
} ahead;
#define AHEAD(span, ...) &(ahead){span, {__VA_ARGS__}}

static inline __attribute__((always_inline)) void fetch(const ahead *next, int64_t i) {
    if (next == NULL || i >= next->s.count) return;
    for (const view *const *x = next->views; *x; x++)
        for (int64_t r = 0; r < ROWS; r++)
            for (int d = 0; d < D; d += 16)
                __builtin_prefetch(at(*x, next->s) + (next->s.count + i + r) * (*x)->token + d);
}

/* One panel of `multiply`: its sums stay in registers. */
static inline __attribute__((always_inline)) void panel(
    const int columns, const int add, int64_t inner, const float *a, int64_t a_row, int64_t a_inner, const float *b,
    int64_t b_inner, float scale, float *out, int64_t out_row) {
    vec sum[ROWS][PANEL] = {0};
    for (int64_t i = 0; i < inner; i++, a += a_inner, b += b_inner) {
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            const vec right = *(const vec *)(b + c * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sum[r][c] += a[r * a_row] * right;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            vec *o = (vec *)(out + r * out_row + c * LANES);
            *o = add ? *o + scale * sum[r][c] : scale * sum[r][c];
        }
    }
}

/* out (m, n) = or += scale * A (m, inner) B (inner, n). A has any strides, B and out are dense; m and n are
   multiples of 16. */
static void multiply(
    const int add, int64_t m, int64_t n, int64_t inner, const float *a, int64_t a_row, int64_t a_inner, const float *b,
    float scale, float *out, const ahead *next) {
    int64_t c = 0;
#define STRIPES(columns)                                                                                    \
    for (; c + columns * LANES <= n; c += columns * LANES)                                                  \
        for (int64_t r = 0; r < m; r += ROWS) {                                                             \
            if (c == 0) fetch(next, r);                                                                     \
            panel(columns, add, inner, a + r * a_row, a_row, a_inner, b + c, n, scale, out + r * n + c, n); \
        }
    STRIPES(PANEL)
    STRIPES(2)
    STRIPES(1)
}

/* out (m, n) = the transpose of x (n, m), in squares that stay in registers; n and m are multiples of 16. Inlined, its
   hundreds of shuffles take half the time of compilation, and no less of a call. */
static __attribute__((noinline)) void transpose(int64_t n, int64_t m, const float *x, float *out) {
    for (int64_t i = 0; i < n; i += 16)
        for (int64_t j = 0; j < m; j += 16)
            for (int jj = 0; jj < 16; jj++)
                for (int ii = 0; ii < 16; ii++) out[(j + jj) * n + i + ii] = x[(i + ii) * m + j + jj];
}

/* x = softmax(x) over n numbers without those whose valid is 0; all 0 where nothing is valid. */
static inline void softmax(int64_t n, const float *valid, float *x) {
    float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) {
        const float y = valid == NULL || valid[j] > 0 ? x[j] : -INFINITY;
        top = y > top ? y : top;
    }
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < n; j++) {
        x[j] = valid == NULL || valid[j] > 0 ? exponential(x[j] - top) : 0;
        total += x[j];
    }
    const float inverse = total == 0 ? 0 : 1 / total;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) x[j] *= inverse;
}

static inline float dot(int64_t n, const float *x, const float *y) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* dp = p (dp - Σ p dp), the derivative of a softmax over n numbers. */
static inline void softmax_backward(int64_t n, const float *p, float *dp) {
    const float mean = dot(n, p, dp);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) dp[j] = p[j] * (dp[j] - mean);
}

/* ---- tiles ---- */

static inline int64_t multiple(int64_t n) { return (n + MULTIPLE - 1) / MULTIPLE * MULTIPLE; }

/* Whether the tile lies in the tensor as it is computed with: full, its rows side by side. Rows far apart are copied:
   their distance is often a multiple of a large power of two, and they would push each other out of the cache. */
static inline int in_place(const view *x, span s) { return s.count == s.padded && x->token == D; }

/* Where a tile is computed: in the tensor itself or, if that cannot be, in `copy`; then `store`. */
static inline float *target(const view *x, span s, float *copy) { return in_place(x, s) ? at(x, s) : copy; }

static inline void store(const view *x, span s, const float *from) {
    if (in_place(x, s)) return;
    for (int64_t i = 0; i < s.count; i++) memcpy(at(x, s) + i * x->token, from + i * D, D * sizeof(float));
}

/* A tile: in the tensor itself or, if that cannot be, a copy with zeros beyond the end and, of the rows whose valid
   is 0, only the numbers below `limit`: what padding holds, NaN and inf too, must not get into a sum. */
static inline float *load(const view *x, span s, const float *valid, float limit, float *copy) {
    if (in_place(x, s) && valid == NULL) return at(x, s);
    for (int64_t i = 0; i < s.count; i++) {
        const float *from = at(x, s) + i * x->token;
        float *to = copy + i * D;
        if (valid == NULL || valid[i] > 0) {
            memcpy(to, from, D * sizeof(float));
        } else {
#pragma omp simd
            for (int d = 0; d < D; d++) to[d] = fabsf(from[d]) < limit ? from[d] : 0;
        }
    }
    memset(copy + s.count * D, 0, (s.padded - s.count) * D * sizeof(float));
    return copy;
}
