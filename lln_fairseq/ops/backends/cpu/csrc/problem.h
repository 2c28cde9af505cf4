/* What a call is about, the scratch memory of a thread, and the tiles of a head. */

#include "tiles.h"

typedef struct {
    const float *x, *y;
    int64_t points;
} table;

typedef struct { /* backends/cpu/__init__.py packs it, field by field */
    int64_t batches, heads, tokens, tile, threads;
    int64_t rows;  /* of a state, see below */
    int64_t kept; /* of the 2^16 values of 16 random bits, those that keep a weight; 0 = no dropout */
    int64_t joint; /* whether it is the joint form, see joint.h */
    uint64_t seed;
    double lln, diag;              /* weights of the two parts; a part of weight 0 is not computed */
    const uint8_t *padding;        /* (B, N), 1 = padded, or NULL */
    float *alpha, *beta;           /* (B H) */
    float *states;                 /* (B H, rows, D): S, and L; of D + 3 rows the last are max and sum of L */
    float *dalpha, *dbeta;         /* (B H) or NULL */
    float *parameter, *dparameter; /* (B H) or NULL, the offset of the joint form */
    float *shared;                 /* (B H, D + 1, D): dS and g, between the two halves of backward; or NULL */
    float *scratch;                /* threads x scratch_floats(tile) */
    table calibration;             /* alpha and beta are matched with it if it has points */
    view q, k, v, out, dq, dk, dv; /* backward, out is the gradient of the output */
} problem;

/* What a thread works in: tiles of tokens (n, D), squares of a block (n, n), states (D, D), vectors (D). A or W are the
   features, dx or dy the slopes; what is turned is transposed. */
#define TILES(_) _(q) _(k) _(v) _(grad) _(out) _(features) _(slopes) _(turned) _(dq) _(dk) _(dv)
#define SQUARES(_) _(weight) _(dweight) _(kept) _(inside)
#define STATES(_) _(dstate) _(turned_state)
#define VECTORS(_) _(top) _(total) _(factor) _(g)
#define POINTER(name) float *name;
#define ONE(name) +1
typedef struct {
    TILES(POINTER) SQUARES(POINTER) STATES(POINTER) VECTORS(POINTER) float *valid, *outer; /* (n) */
} scratch;

int64_t scratch_floats(int64_t tile) {
    const int64_t n = multiple(tile);
    return (TILES(ONE)) * n * D + (SQUARES(ONE)) * n * n + (STATES(ONE)) * D * D + (VECTORS(ONE)) * D + 2 * n;
}

static scratch carve(const problem *p, int thread) {
    const int64_t n = multiple(p->tile);
    float *next = p->scratch + thread * scratch_floats(p->tile);
    scratch c;
#define TAKE(size, name) c.name = next, next += size;
#define TILE(name) TAKE(n * D, name)
#define SQUARE(name) TAKE(n * n, name)
#define STATE(name) TAKE(D * D, name)
#define VECTOR(name) TAKE(D, name)
    TILES(TILE) SQUARES(SQUARE) STATES(STATE) VECTORS(VECTOR) c.valid = next, c.outer = next + n;
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
    return load(x, s, valid, 3e4f, copy); /* ops/padding.py has the same limit */
}

static const float *load_keys(const view *x, span s, const float *valid, float *copy) {
    return load(x, s, valid, 0, copy);
}

static float *state_of(const problem *p, int64_t head) { return p->states + head * p->rows * D; }

static float *log_sum_of(const problem *p, int64_t head) { return state_of(p, head) + D * D; }
