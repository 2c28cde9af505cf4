/* The keys of a block: its own tokens, followed by the global tokens that lie before the block. Calls without global
   tokens have only the own ones. */

typedef struct {
    span own, global;
    int64_t rows;       /* rows of both tiles together */
    const float *valid; /* 1 for each key, 0 for padding and for rows beyond a tile's last token; NULL = all 1 */
} key_span;

/* Return the keys of the block `s`. Their marks `valid` are stored in c.valid or c.valid_keys. */
static key_span keys_of_block(const problem *p, span s, scratch c) {
    const int64_t global_tokens = p->global_tokens ? p->global_tokens[s.batch] : 0;
    const int64_t count = global_tokens < s.start ? global_tokens : s.start;
    const span global = {s.batch, s.head, 0, count, round_up(count)};
    if (count == 0) return (key_span){s, global, s.rows, valid_tokens(p, s, c)};
    mark_valid_tokens(p, s, c.valid_keys);
    mark_valid_tokens(p, global, c.valid_keys + s.rows);
    return (key_span){s, global, s.rows + global.rows, c.valid_keys};
}

/* Return the rows of `x` that belong to the keys of the block, the global keys last. They are copied to `copy`, unless
   there are no global keys and the tile can be used in the tensor itself. */
static const float *load_block_keys(const view *x, key_span keys, float *copy) {
    const float *own = load_keys(x, keys.own, keys.valid, copy);
    if (keys.global.count == 0) return own;
    if (own != copy) memcpy(copy, own, keys.own.rows * D * sizeof(float));
    load_keys(x, keys.global, keys.valid + keys.own.rows, copy + keys.own.rows * D);
    return copy;
}

/* Return where to compute the gradients of the keys of the block: in `copy` if there are global keys, otherwise where
   output_tile says. */
static float *output_block_keys(const view *x, key_span keys, float *copy) {
    return keys.global.count == 0 ? output_tile(x, keys.own, copy) : copy;
}

/* Store the gradients of the keys of a block that were computed where output_block_keys says. The gradients of the own
   keys are written to the tensor, and the gradients of the global keys are added to `global_grad`. */
static void store_block_keys(const view *x, key_span keys, const float *from, float *global_grad) {
    if (keys.global.count == 0) {
        store_tile(x, keys.own, from);
        return;
    }
    for (int64_t i = 0; i < keys.own.count; i++)
        memcpy(first_token(x, keys.own) + i * x->token, from + i * D, D * sizeof(float));
    from += keys.own.rows * D;
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
