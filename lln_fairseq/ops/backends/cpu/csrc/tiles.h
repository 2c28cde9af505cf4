/* Tiles of tokens: matrix products, softmax, and how a tile is read from and written to a tensor (B, H, N, D). */

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
/* LANES is the number of floats in a vector. A matrix product is computed in panels of ROWS x PANEL vectors. The rows
   of a tile are rounded up to a multiple of MULTIPLE. */
enum { ROWS = 4, MULTIPLE = 16 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* A tensor (B, H, N, D) whose features are contiguous. */
typedef struct {
    float *data;
    int64_t batch, head, token; /* strides in elements */
} view;

/* The `count` tokens of one head that begin at token `start`. Their tile has `rows` rows: count rounded up. */
typedef struct {
    int64_t batch, head, start, count, rows;
} span;

static inline float *first_token(const view *x, span s) {
    return x->data + s.batch * x->batch + s.head * x->head + s.start * x->token;
}

/* ---- arithmetic ---- */

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

/* What to prefetch while a product on the tile `s` leaves the memory idle: the tile after `s` of every view. The list
   of views ends with NULL. */
typedef struct {
    span s;
    const view *views[4];
} prefetch;
#define PREFETCH(span, ...) &(prefetch){span, {__VA_ARGS__}}

/* Prefetch the ROWS tokens from row i of the tile after next->s. Do nothing if `next` is NULL. */
static inline __attribute__((always_inline)) void prefetch_rows(const prefetch *next, int64_t i) {
    if (next == NULL || i >= next->s.count) return;
    for (const view *const *x = next->views; *x; x++)
        for (int64_t r = 0; r < ROWS; r++)
            for (int d = 0; d < D; d += 16)
                __builtin_prefetch(first_token(*x, next->s) + (next->s.count + i + r) * (*x)->token + d);
}

/* Compute one panel of `multiply`; its sums stay in registers. */
static inline __attribute__((always_inline)) void multiply_panel(
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

/* Compute out = scale * A B, or out += scale * A B if `add` is true, with A (m, inner), B (inner, n) and out (m, n).
   A has any strides, a_row and a_inner; B and out are contiguous. m and n are multiples of 16. */
static void multiply(
    const int add, int64_t m, int64_t n, int64_t inner, const float *a, int64_t a_row, int64_t a_inner, const float *b,
    float scale, float *out, const prefetch *next) {
    int64_t c = 0;
#define STRIPES(columns)                                                                                             \
    for (; c + columns * LANES <= n; c += columns * LANES)                                                           \
        for (int64_t r = 0; r < m; r += ROWS) {                                                                      \
            if (c == 0) prefetch_rows(next, r);                                                                      \
            multiply_panel(columns, add, inner, a + r * a_row, a_row, a_inner, b + c, n, scale, out + r * n + c, n); \
        }
    STRIPES(PANEL)
    STRIPES(2)
    STRIPES(1)
}

/* Compute out (m, n) as the transpose of x (n, m), in squares that stay in registers. n and m are multiples of 16.
   Inlining it would double the time of compilation, because of its hundreds of shuffles, and would not be faster. */
static __attribute__((noinline)) void transpose(int64_t n, int64_t m, const float *x, float *out) {
    for (int64_t i = 0; i < n; i += 16)
        for (int64_t j = 0; j < m; j += 16)
            for (int jj = 0; jj < 16; jj++)
                for (int ii = 0; ii < 16; ii++) out[(j + jj) * n + i + ii] = x[(i + ii) * m + j + jj];
}

/* Replace x by its softmax over those of its n numbers whose `valid` is 1, or over all if `valid` is NULL. The others
   have 0 in `valid` and become 0; so do all if every number is excluded. The loops have no branches, so that they are
   computed in vectors; `exponential` accepts the large differences of excluded numbers. */
static inline void softmax(int64_t n, const float *valid, float *x) {
    float row_max = -INFINITY;
    float total = 0;
    if (valid == NULL) {
#pragma omp simd reduction(max : row_max)
        for (int64_t j = 0; j < n; j++) row_max = x[j] > row_max ? x[j] : row_max;
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < n; j++) {
            x[j] = exponential(x[j] - row_max);
            total += x[j];
        }
    } else {
#pragma omp simd reduction(max : row_max)
        for (int64_t j = 0; j < n; j++) {
            const float y = valid[j] > 0 ? x[j] : -INFINITY;
            row_max = y > row_max ? y : row_max;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < n; j++) {
            x[j] = exponential(x[j] - row_max) * valid[j];
            total += x[j];
        }
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

/* Replace dp by p (dp - Σ p dp), the gradient through a softmax over n numbers. */
static inline void softmax_backward(int64_t n, const float *p, float *dp) {
    const float mean = dot(n, p, dp);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) dp[j] = p[j] * (dp[j] - mean);
}

/* ---- tiles ---- */

static inline int64_t round_up(int64_t n) { return (n + MULTIPLE - 1) / MULTIPLE * MULTIPLE; }

/* Return 1 if the tile can be used in the tensor itself: it is full, and its rows are contiguous. Rows far apart are
   copied, because their distance is often a multiple of a large power of two and they would evict each other from the
   cache. */
static inline int is_in_place(const view *x, span s) { return s.count == s.rows && x->token == D; }

/* Return where to write the values of a tile: the tensor itself if it can be used, otherwise `copy`. After writing
   them, call store_tile. */
static inline float *output_tile(const view *x, span s, float *copy) {
    return is_in_place(x, s) ? first_token(x, s) : copy;
}

/* Copy the values of a tile from the memory that output_tile returned to the tensor, unless that is the tensor. */
static inline void store_tile(const view *x, span s, const float *from) {
    if (is_in_place(x, s)) return;
    for (int64_t i = 0; i < s.count; i++) memcpy(first_token(x, s) + i * x->token, from + i * D, D * sizeof(float));
}

/* Return the rows of a tile: in the tensor itself if it can be used and `valid` is NULL, otherwise copied to `copy`,
   with zeros in the rows beyond the last token. Rows whose `valid` is 0 are padding, which may hold NaN and infinity.
   Of these rows, only numbers with a magnitude below `limit` are copied, and the others become 0. */
static inline float *load_tile(const view *x, span s, const float *valid, float limit, float *copy) {
    if (is_in_place(x, s) && valid == NULL) return first_token(x, s);
    for (int64_t i = 0; i < s.count; i++) {
        const float *from = first_token(x, s) + i * x->token;
        float *to = copy + i * D;
        if (valid == NULL || valid[i] > 0) {
            memcpy(to, from, D * sizeof(float));
        } else {
#pragma omp simd
            for (int d = 0; d < D; d++) to[d] = fabsf(from[d]) < limit ? from[d] : 0;
        }
    }
    memset(copy + s.count * D, 0, (s.rows - s.count) * D * sizeof(float));
    return copy;
}
