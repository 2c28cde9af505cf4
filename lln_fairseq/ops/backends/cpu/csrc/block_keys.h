/* The keys of a block: the near tokens, which are its own and those that it reaches, followed by the global tokens that
   lie before them. Calls without global tokens have only the near ones. The joint form reaches no other block. */

typedef struct {
    span near, global;
    int64_t rows;       /* rows of both tiles together */
    const float *valid; /* 1 for each key, 0 for padding and for rows beyond a tile's last token; NULL = all 1 */
} key_span;

/* Return the number of global tokens of a sequence. */
static int64_t global_tokens_of(const problem *p, int64_t batch) {
    return p->global_tokens ? p->global_tokens[batch] : 0;
}

/* Return the keys of the block `s`. Their marks `valid` are stored in c.valid_keys. */
static key_span keys_of_block(const problem *p, span s, scratch c) {
    const int64_t start = s.start < p->reach ? 0 : s.start - p->reach;
    const int64_t last = s.start + s.count + p->reach;
    const int64_t near_count = (last < p->tokens ? last : p->tokens) - start;
    const span near = {s.batch, s.head, start, near_count, round_up(near_count)};
    const int64_t global_tokens = global_tokens_of(p, s.batch);
    const int64_t count = global_tokens < start ? global_tokens : start;
    const span global = {s.batch, s.head, 0, count, round_up(count)};
    if (count == 0) return (key_span){near, global, near.rows, valid_tokens(p, near, c.valid_keys)};
    mark_valid_tokens(p, near, c.valid_keys);
    mark_valid_tokens(p, global, c.valid_keys + near.rows);
    return (key_span){near, global, near.rows + global.rows, c.valid_keys};
}

/* Return the marks of the block's own tokens among those of its keys; NULL = all 1. */
static const float *own_marks(span s, key_span keys) {
    return keys.valid ? keys.valid + s.start - keys.near.start : NULL;
}

/* Return the rows of `x` that belong to the keys of the block, the global keys last. They are copied to `copy`, unless
   there are no global keys and the tile can be used in the tensor itself. */
static const float *load_block_keys(const view *x, key_span keys, float *copy) {
    const float *near = load_keys(x, keys.near, keys.valid, copy);
    if (keys.global.count == 0) return near;
    if (near != copy) memcpy(copy, near, keys.near.rows * D * sizeof(float));
    load_keys(x, keys.global, keys.valid + keys.near.rows, copy + keys.near.rows * D);
    return copy;
}

/* Return where to compute the gradients of the keys of the block: in `copy` if there are global keys, otherwise where
   output_tile says. */
static float *output_block_keys(const view *x, key_span keys, float *copy) {
    return keys.global.count == 0 ? output_tile(x, keys.near, copy) : copy;
}

/* Store the gradients of the keys of a block that were computed where output_block_keys says. The gradients of the near
   keys are written to the tensor, and the gradients of the global keys are added to `global_grad`. */
static void store_block_keys(const view *x, key_span keys, const float *from, float *global_grad) {
    if (keys.global.count == 0) {
        store_tile(x, keys.near, from);
        return;
    }
    for (int64_t i = 0; i < keys.near.count; i++)
        memcpy(first_token(x, keys.near) + i * x->token, from + i * D, D * sizeof(float));
    from += keys.near.rows * D;
#pragma omp simd
    for (int64_t i = 0; i < keys.global.count * D; i++) global_grad[i] += from[i];
}

/* Set the sums of the gradients of the global keys to 0. */
static void clear_global_gradients(const problem *p, scratch c) {
    memset(c.global_grad_k, 0, round_up(p->max_global) * D * sizeof(float));
    memset(c.global_grad_v, 0, round_up(p->max_global) * D * sizeof(float));
}

static void add_global_rows(const view *x, span global, const float *global_grad) {
    for (int64_t i = 0; i < global.count; i++) {
        float *to = first_token(x, global) + i * x->token;
#pragma omp simd
        for (int d = 0; d < D; d++) to[d] += global_grad[i * D + d];
    }
}

/* Add the gradients of the global keys, which are summed over all blocks of a head, to those in the tensors. */
static void add_global_gradients(const problem *p, int64_t head, scratch c) {
    if (p->global_tokens == NULL) return;
    span global = tile_at(p, head, 0);
    global.count = p->global_tokens[global.batch];
    add_global_rows(&p->grad_k, global, c.global_grad_k);
    add_global_rows(&p->grad_v, global, c.global_grad_v);
}

/* Return a tile of the gradient of the output, in which the rows of global queries are 0. */
static const float *load_block_gradient(const problem *p, span s, float *copy) {
    float *grad_out = load_tile(&p->out, s, NULL, 0, copy);
    const int64_t remaining = global_tokens_of(p, s.batch) - s.start;
    if (remaining <= 0) return grad_out;
    if (grad_out != copy) memcpy(copy, grad_out, s.rows * D * sizeof(float));
    memset(copy, 0, (remaining < s.count ? remaining : s.count) * D * sizeof(float));
    return copy;
}
