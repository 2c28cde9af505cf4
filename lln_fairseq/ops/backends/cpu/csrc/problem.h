/* The arguments of a call, the scratch memory of a thread, and the tiles of a head. */

#include "tiles.h"

enum { ROW_TILE = 128 }; /* keys of a tile of the rows of global queries */

typedef struct {
    const float *x, *y;
    int64_t points;
} table;

/* The arguments of a call. FIELDS in backends/cpu/__init__.py lists them in the same order. */
typedef struct {
    int64_t batches, heads, tokens, tile_size, threads;
    int64_t keep_threshold; /* a probability is kept if its 16 random bits are less than this; 0 = no dropout */
    int64_t joint;          /* 1 for the joint form, see joint.h; otherwise 0 */
    int64_t max_global;     /* no number in `global_tokens` is larger; 0 without it */
    int64_t reach;          /* tokens on each side of a block that are keys of the block too */
    int64_t band;           /* the largest distance of a query's keys, at most `reach`; -1 for no such limit */
    uint64_t seed;
    double lln_weight, diag_weight; /* weights of the two parts; a part of weight 0 is not computed */
    const uint8_t *padding;         /* (B, N), 1 = padded, or NULL */
    float *alpha, *beta;            /* (B H) */
    float *states;                  /* (B H, D + 3, D): S, L, and the maximum and the sum from which L is computed */
    float *grad_alpha, *grad_beta;  /* (B H) or NULL */
    float *offset, *grad_offset;    /* (B H) or NULL, the offset of the joint form */
    const int64_t *global_tokens;   /* (B), the number of global tokens of every sequence, or NULL; see block_keys.h */
    int64_t parts, part_tokens;     /* of the keys of a head, and the tokens of one; see global_rows.h */
    float *rows, *row_stats;        /* (B H, max_global, D) and (B H, 2, max_global): see finish_rows_forward */
    float *row_parts;               /* (B H, parts, max_global rounded up, D + 2) */
    float *scratch;                 /* threads x scratch_floats(tile_size, reach, max_global) */
    table calibration;              /* the table of moment matching; without points, alpha and beta are inputs */
    view q, k, v;
    view out; /* in a backward pass, the gradient of the output */
    view grad_q, grad_k, grad_v;
} problem;

/* The scratch memory of a thread. A block has n tokens of its own. Its keys are up to w tokens, which are its own and
   those that it reaches, and up to g global tokens, so that it has up to keys = w + g keys. The suffix _T marks a
   transposed matrix. The shapes are

     TILES           (n, D)       a tile of tokens
     KEY_TILES       (keys, D)    the keys of a block
     GLOBAL_TILES    (g, D)       the gradients of the global keys
     MATRICES        (n, keys)    a matrix of a block
     STATES          (D, D)
     VECTORS         (D)
     valid, outside_weight (n), valid_keys (keys)

   The rows of the global queries have tiles of r keys, r = ROW_TILE, if there are any. For them, there are

     QUERY_ROWS      (g, D)
     ROW_TILES       (r, D)
     ROW_MATRICES    (g, r)
     row_valid (g + r), of which max(g, r) are used */
#define TILES(_) _(q) _(grad_out) _(features) _(grad_logits) _(grad_q)
#define KEY_TILES(_) _(k) _(v) _(out) _(transposed) _(grad_k) _(grad_v)
#define GLOBAL_TILES(_) _(global_grad_k) _(global_grad_v)
#define MATRICES(_) _(probs) _(grad_probs) _(dropout) _(lln_probs)
#define STATES(_) _(grad_state) _(state_T)
#define VECTORS(_) _(key_max) _(key_sum) _(factor) _(g)
#define QUERY_ROWS(_) _(row_q) _(row_grad_out)
#define ROW_TILES(_) _(row_k) _(row_v) _(row_transposed) _(row_grad_k) _(row_grad_v)
#define ROW_MATRICES(_) _(row_probs) _(row_grad_probs) _(row_dropout)
#define POINTER(name) float *name;
#define ONE(name) +1
typedef struct {
    TILES(POINTER) KEY_TILES(POINTER) GLOBAL_TILES(POINTER) MATRICES(POINTER) STATES(POINTER) VECTORS(POINTER)
    QUERY_ROWS(POINTER) ROW_TILES(POINTER) ROW_MATRICES(POINTER)
    float *valid, *outside_weight, *valid_keys, *row_valid;
} scratch;

/* Return the number of floats of scratch memory that one thread needs. */
int64_t scratch_floats(int64_t tile_size, int64_t reach, int64_t max_global) {
    const int64_t n = round_up(tile_size);
    const int64_t g = round_up(max_global);
    const int64_t keys = round_up(tile_size + 2 * reach) + g;
    const int64_t r = g ? ROW_TILE : 0;
    return (TILES(ONE)) * n * D + (KEY_TILES(ONE)) * keys * D + (GLOBAL_TILES(ONE)) * g * D + (MATRICES(ONE)) * n * keys
           + (STATES(ONE)) * D * D + (VECTORS(ONE)) * D + 2 * n + keys
           + (QUERY_ROWS(ONE)) * g * D + (ROW_TILES(ONE)) * r * D + (ROW_MATRICES(ONE)) * g * r + g + r;
}

/* Divide the scratch memory of a thread into its parts. */
static scratch divide_scratch(const problem *p, int thread) {
    const int64_t n = round_up(p->tile_size);
    const int64_t g = round_up(p->max_global);
    const int64_t keys = round_up(p->tile_size + 2 * p->reach) + g;
    const int64_t r = g ? ROW_TILE : 0;
    float *next = p->scratch + thread * scratch_floats(p->tile_size, p->reach, p->max_global);
    scratch c;
#define TAKE(size, name) c.name = next, next += size;
#define TILE(name) TAKE(n * D, name)
#define KEY_TILE(name) TAKE(keys * D, name)
#define GLOBAL_TILE(name) TAKE(g * D, name)
#define MATRIX(name) TAKE(n * keys, name)
#define STATE(name) TAKE(D * D, name)
#define VECTOR(name) TAKE(D, name)
#define QUERY_ROW(name) TAKE(g * D, name)
#define ROW_TILE_OF(name) TAKE(r * D, name)
#define ROW_MATRIX(name) TAKE(g * r, name)
    TILES(TILE) KEY_TILES(KEY_TILE) GLOBAL_TILES(GLOBAL_TILE) MATRICES(MATRIX) STATES(STATE) VECTORS(VECTOR)
    QUERY_ROWS(QUERY_ROW) ROW_TILES(ROW_TILE_OF) ROW_MATRICES(ROW_MATRIX)
    c.valid = next;
    c.outside_weight = next + n;
    c.valid_keys = next + 2 * n;
    c.row_valid = c.valid_keys + keys;
    return c;
}

/* Return the tile of a head that begins at token `start`; the last tile may have fewer tokens. */
static span tile_at(const problem *p, int64_t head, int64_t start) {
    const int64_t remaining = p->tokens - start;
    const int64_t count = remaining < p->tile_size ? remaining : p->tile_size;
    return (span){head / p->heads, head % p->heads, start, count, round_up(count)};
}

/* Write s.rows marks to `valid`: 1 for each token of a tile, 0 for padding and for rows beyond the last token. */
static void mark_valid_tokens(const problem *p, span s, float *valid) {
    const uint8_t *padding = p->padding ? p->padding + s.batch * p->tokens + s.start : NULL;
    for (int64_t j = 0; j < s.rows; j++) valid[j] = j < s.count && !(padding && padding[j]);
}

/* Return the marks of the rows of a tile, stored in `valid`, or NULL if all marks would be 1. */
static const float *valid_tokens(const problem *p, span s, float *valid) {
    const uint8_t *padding = p->padding ? p->padding + s.batch * p->tokens + s.start : NULL;
    if (s.count == s.rows && !(padding && memchr(padding, 1, s.count))) return NULL;
    mark_valid_tokens(p, s, valid);
    return valid;
}

/* Return a tile of queries, in which numbers of padding queries are 0 if they are NaN or at least PADDED_QUERY_LIMIT
   in magnitude. The result is in the tensor itself if possible, otherwise in `copy`. */
static const float *load_queries(const view *x, span s, const float *valid, float *copy) {
    return load_tile(x, s, valid, PADDED_QUERY_LIMIT, copy);
}

/* Return a tile of keys or values, in which padding tokens are 0. */
static const float *load_keys(const view *x, span s, const float *valid, float *copy) {
    return load_tile(x, s, valid, 0, copy);
}

/* Return a pointer to S (D, D) or to L (D) of a head. */
static float *state_of_head(const problem *p, int64_t head) { return p->states + head * (D + 3) * D; }

static float *log_sum_of_head(const problem *p, int64_t head) { return state_of_head(p, head) + D * D; }
