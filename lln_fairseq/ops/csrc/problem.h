/* What a call is about, the scratch memory of a thread, and the tiles of a head. */

#include "tiles.h"

typedef struct {
    const float *x, *y;
    int64_t points;
} table;

typedef struct { /* lln_cpu.py packs it */
    int64_t batches, heads, tokens, tile, threads;
    int64_t kept; /* of the 2^16 values of 16 random bits, those that keep a weight; 0 = no dropout */
    uint64_t seed;
    double lln, diag;              /* weights of the two parts; a part of weight 0 is not computed */
    const uint8_t *padding;        /* (B, N), 1 = padded, or NULL */
    float *alpha, *beta;           /* (B H) */
    float *states;                 /* (B H, D + 1, D): S, and L in the last row */
    float *dalpha, *dbeta;         /* (B H) or NULL */
    float *scratch;                /* threads x scratch_floats(tile) */
    table calibration;             /* alpha and beta are matched with it if it has points */
    view q, k, v, out, dq, dk, dv; /* backward, out is the gradient of the output */
} problem;

/* Of the tiles, 0 and 1 hold what a pass reads, 2 and 3 what it computes, 8 and 9 dk and dv, the others what is left. */
enum { TILES = 10, SQUARES = 3, STATES = 2, VECTORS = 3 };
typedef struct {
    float *tile[TILES], *square[SQUARES], *state[STATES], *vector[VECTORS], *valid;
} scratch;

int64_t scratch_floats(int64_t tile) {
    const int64_t n = multiple(tile);
    return TILES * n * D + SQUARES * n * n + STATES * D * D + VECTORS * D + n;
}

static scratch carve(const problem *p, int thread) {
    const int64_t n = multiple(p->tile);
    float *next = p->scratch + thread * scratch_floats(p->tile);
    scratch c;
    for (int i = 0; i < TILES; i++, next += n * D) c.tile[i] = next;
    for (int i = 0; i < SQUARES; i++, next += n * n) c.square[i] = next;
    for (int i = 0; i < STATES; i++, next += D * D) c.state[i] = next;
    for (int i = 0; i < VECTORS; i++, next += D) c.vector[i] = next;
    c.valid = next;
    return c;
}

static span tile_of(const problem *p, int64_t head, int64_t start) {
    const int64_t rest = p->tokens - start, count = rest < p->tile ? rest : p->tile;
    return (span){head / p->heads, head % p->heads, start, count, multiple(count)};
}

/* 1 for real tokens, 0 for padded ones and for rows beyond the end; NULL where all are real. */
static const float *valid_of(const problem *p, span s, scratch c) {
    const uint8_t *padding = p->padding ? p->padding + s.batch * p->tokens + s.start : NULL;
    if (padding && !memchr(padding, 1, s.count)) padding = NULL;
    if (padding == NULL && s.count == s.padded) return NULL;
    for (int64_t j = 0; j < s.padded; j++) c.valid[j] = j < s.count && !(padding && padding[j]);
    return c.valid;
}

/* Queries of padding are answered like others where that can be; its keys and values are 0. */
static const float *load_queries(const view *x, span s, const float *valid, float *copy) {
    return load(x, s, valid, 1e6f, copy); /* ops/padding.py has the same limit */
}

static const float *load_keys(const view *x, span s, const float *valid, float *copy) {
    return load(x, s, valid, 0, copy);
}

static float *state_of(const problem *p, int64_t head) { return p->states + head * (D + 1) * D; }

static float *log_sum_of(const problem *p, int64_t head) { return state_of(p, head) + D * D; }
