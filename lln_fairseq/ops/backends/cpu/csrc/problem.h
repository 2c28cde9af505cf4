/* The arguments of a call, the scratch memory of a thread, and the tiles of a head. */

#include "tiles.h"

typedef struct {
    const float *x, *y;
    int64_t points;
} table;

/* The arguments of a call. backends/cpu/__init__.py packs them field by field. */
typedef struct {
    int64_t batches, heads, tokens, tile_size, threads;
    int64_t state_rows;     /* rows of the state of a head, see `states` */
    int64_t keep_threshold; /* how many values of 16 random bits keep a probability; 0 = no dropout */
    int64_t joint;          /* 1 for the joint form, see joint.h; otherwise 0 */
    uint64_t seed;
    double lln_weight, diag_weight; /* weights of the two parts; a part of weight 0 is not computed */
    const uint8_t *padding;         /* (B, N), 1 = padded, or NULL */
    float *alpha, *beta;            /* (B H) */
    float *states;                  /* (B H, state_rows, D): S, L and, of D + 3 rows, the two parts of L */
    float *grad_alpha, *grad_beta;  /* (B H) or NULL */
    float *offset, *grad_offset;    /* (B H) or NULL, the offset of the joint form */
    float *exchanged;               /* (B H, D + 1, D): dS and g, between the two halves of backward; or NULL */
    float *scratch;                 /* threads x scratch_floats(tile_size) */
    table calibration;              /* if it has points, alpha and beta are computed from it */
    view q, k, v;
    view out; /* in a backward pass, the gradient of the output */
    view grad_q, grad_k, grad_v;
} problem;

/* The scratch memory of a thread: tiles of tokens (n, D), matrices of a block (n, n), states (D, D), vectors (D) and
   vectors of tokens (n). The suffix _T marks a transposed matrix. */
#define TILES(_) \
    _(q) _(k) _(v) _(grad_out) _(out) _(features) _(grad_logits) _(transposed) _(grad_q) _(grad_k) _(grad_v)
#define SQUARES(_) _(probs) _(grad_probs) _(dropout) _(lln_probs)
#define STATES(_) _(grad_state) _(state_T)
#define VECTORS(_) _(key_max) _(key_sum) _(factor) _(g)
#define POINTER(name) float *name;
#define ONE(name) +1
typedef struct {
    TILES(POINTER) SQUARES(POINTER) STATES(POINTER) VECTORS(POINTER) float *valid, *outside_weight;
} scratch;

/* Return the floats of scratch memory that a thread needs. */
int64_t scratch_floats(int64_t tile_size) {
    const int64_t n = round_up(tile_size);
    return (TILES(ONE)) * n * D + (SQUARES(ONE)) * n * n + (STATES(ONE)) * D * D + (VECTORS(ONE)) * D + 2 * n;
}

/* Divide the scratch memory of a thread into its parts. */
static scratch divide_scratch(const problem *p, int thread) {
    const int64_t n = round_up(p->tile_size);
    float *next = p->scratch + thread * scratch_floats(p->tile_size);
    scratch c;
#define TAKE(size, name) c.name = next, next += size;
#define TILE(name) TAKE(n * D, name)
#define SQUARE(name) TAKE(n * n, name)
#define STATE(name) TAKE(D * D, name)
#define VECTOR(name) TAKE(D, name)
    TILES(TILE) SQUARES(SQUARE) STATES(STATE) VECTORS(VECTOR)
    c.valid = next;
    c.outside_weight = next + n;
    return c;
}

/* Return the tile of a head that begins at token `start`; the last tile may have fewer tokens. */
static span tile_at(const problem *p, int64_t head, int64_t start) {
    const int64_t remaining = p->tokens - start;
    const int64_t count = remaining < p->tile_size ? remaining : p->tile_size;
    return (span){head / p->heads, head % p->heads, start, count, round_up(count)};
}

/* Return 1 for each real token of a tile and 0 for padded tokens and for rows beyond the last token, in c.valid; NULL
   if every row is a real token. */
static const float *valid_tokens(const problem *p, span s, scratch c) {
    const uint8_t *padding = p->padding ? p->padding + s.batch * p->tokens + s.start : NULL;
    if (padding && !memchr(padding, 1, s.count)) padding = NULL;
    if (padding == NULL && s.count == s.rows) return NULL;
    for (int64_t j = 0; j < s.rows; j++) c.valid[j] = j < s.count && !(padding && padding[j]);
    return c.valid;
}

/* Padded queries are computed like real ones, except for numbers that no computation would survive; padded keys and
   values are 0. */
static const float *load_queries(const view *x, span s, const float *valid, float *copy) {
    return load_tile(x, s, valid, 3e4f, copy); /* the limit of ops/padding.py */
}

static const float *load_keys(const view *x, span s, const float *valid, float *copy) {
    return load_tile(x, s, valid, 0, copy);
}

/* Pointers into the state of a head: S (D, D) and L (D). */
static float *state_of_head(const problem *p, int64_t head) { return p->states + head * p->state_rows * D; }

static float *log_sum_of_head(const problem *p, int64_t head) { return state_of_head(p, head) + D * D; }
