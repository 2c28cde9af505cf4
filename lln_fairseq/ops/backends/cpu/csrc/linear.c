/* A linear layer on a CPU in float32, out = x W' + bias, optionally followed by GELU.

   The weight is packed: its rows are in panels of PANEL, and a panel is stored column by column. Reading it is then one
   stream of memory, and the sums of a block of ROWS rows of x and a panel stay in registers. Every sum is formed in the
   same order for any number of rows and threads, so that a row's result does not depend on the other rows. */

#include <string.h>

#include "vectors.h"

#if defined(__AVX512F__)
enum { ROWS = 14 }; /* 28 of 32 registers hold sums */
#else
enum { ROWS = 6 }; /* 12 of 16 registers */
#endif
enum {
    PANEL = 2 * LANES,
    PIECE = 256, /* terms that are added up in a register: a longer sum would be less accurate */
    CHUNK = 8,   /* blocks of rows that are computed with a panel while it is in the cache */
};

/* The arguments of a call. backends/cpu/linear.py packs them field by field. */
typedef struct {
    int64_t rows, inner, columns, threads;
    int64_t gelu;        /* 1 to apply GELU, otherwise 0 */
    const float *x;      /* (rows, inner) */
    const float *weight; /* (columns / PANEL, inner, PANEL); columns is a multiple of PANEL */
    const float *bias;   /* (columns) */
    float *out;          /* (rows, columns) */
} problem;

int64_t panel_columns(void) { return PANEL; }

/* Compute x Φ(x) with the error function of Abramowitz and Stegun 7.1.26, whose absolute error is 1.5e-7. */
static inline float gelu(float x) {
    const float z = fabsf(x) * 0.70710678118654752f;
    const float t = 1.0f / (1.0f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * exponential(-z * z); /* Φ(-|x|) */
    return x * (x > 0.0f ? 1.0f - tail : tail);
}

/* Add the product of a piece of x (rows, inner) and of a panel (inner, PANEL) to `start` (PANEL), the bias, and store it
   in out (rows, PANEL). If `start` is NULL, the product is added to `out`. The rows of x and out have any strides. */
static inline __attribute__((always_inline)) void multiply_piece(
    const int rows, int64_t inner, const float *x, int64_t x_row, const float *panel, const vec *start, float *out,
    int64_t out_row) {
    vec sum[ROWS][2] = {0};
    for (int64_t i = 0; i < inner; i++, x++, panel += PANEL) {
        const vec left = *(const vec *)panel;
        const vec right = *(const vec *)(panel + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            sum[r][0] += x[r * x_row] * left;
            sum[r][1] += x[r * x_row] * right;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vec *o = (vec *)(out + r * out_row);
        const vec *begin = start ? start : o;
        o[0] = begin[0] + sum[r][0];
        o[1] = begin[1] + sum[r][1];
    }
}

/* Compute a panel of columns of `rows` rows, from row `first` on. */
static inline __attribute__((always_inline)) void compute_block(
    const int rows, const problem *p, int64_t first, int64_t panel) {
    const int64_t inner = p->inner;
    const float *weight = p->weight + panel * inner * PANEL;
    const vec *start = (const vec *)(p->bias + panel * PANEL);
    float *out = p->out + first * p->columns + panel * PANEL;
    /* Rows at a multiple of 4 KB would evict each other from the cache, so they are copied. */
    float copies[ROWS * (PIECE + 16)];
    const int is_copied = inner % 1024 == 0;
    for (int64_t i = 0; i < inner; i += PIECE, weight += PIECE * PANEL, start = NULL) {
        const int64_t count = inner - i < PIECE ? inner - i : PIECE;
        const float *x = p->x + first * inner + i;
        int64_t x_row = inner;
        if (is_copied) {
            for (int r = 0; r < rows; r++) memcpy(copies + r * (PIECE + 16), x + r * inner, count * sizeof(float));
            x = copies;
            x_row = PIECE + 16;
        }
        multiply_piece(rows, count, x, x_row, weight, start, out, p->columns);
    }
    if (!p->gelu) return;
    for (int r = 0; r < rows; r++) {
        float *o = out + r * p->columns;
#pragma omp simd
        for (int c = 0; c < PANEL; c++) o[c] = gelu(o[c]);
    }
}

/* Compute a block of 1 to ROWS rows. The number of rows is a constant in every case. */
static void compute_rows(int64_t rows, const problem *p, int64_t first, int64_t panel) {
#define CASE(n) \
    case n: compute_block(n, p, first, panel); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#endif
    }
}

void linear(const problem *p) {
    const int64_t blocks = (p->rows + ROWS - 1) / ROWS; /* of nearly equal size */
    const int64_t chunks = (blocks + CHUNK - 1) / CHUNK;
    const int64_t panels = p->columns / PANEL;
#pragma omp parallel for collapse(2) schedule(static) num_threads(p->threads) if (p->threads > 1)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        for (int64_t panel = 0; panel < panels; panel++) {
            for (int64_t block = chunk * CHUNK; block < (chunk + 1) * CHUNK && block < blocks; block++) {
                const int64_t first = block * p->rows / blocks;
                const int64_t end = (block + 1) * p->rows / blocks;
                compute_rows(end - first, p, first, panel);
            }
        }
    }
}
