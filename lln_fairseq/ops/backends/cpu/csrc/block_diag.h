/* Softmax attention to the keys of a block. In a call with blocks, each tile is a block. */

/* Draw 1 (keep) or 0 (drop) for each of `count` probabilities of a tile. Each takes 16 bits from the generator
   Philox4x32-10 (Salmon et al., SC 2011). The numbers depend only on the seed, the head, the start of the tile and the
   stream, which is 0 for blocks. */
static void draw_dropout(const problem *p, span s, int64_t stream, int64_t count, float *dropout) {
    const int64_t words = count / 8;
    const int64_t head = s.batch * p->heads + s.head;
#pragma omp simd
    for (int64_t i = 0; i < words; i++) {
        uint32_t x[4] = {(uint32_t)i, (uint32_t)s.start, (uint32_t)head, (uint32_t)stream};
        uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)};
        for (int round = 0; round < 10; round++) {
            const uint64_t a = (uint64_t)0xD2511F53u * x[0];
            const uint64_t b = (uint64_t)0xCD9E8D57u * x[2];
            x[0] = (uint32_t)(b >> 32) ^ x[1] ^ key[0];
            x[2] = (uint32_t)(a >> 32) ^ x[3] ^ key[1];
            x[1] = (uint32_t)b;
            x[3] = (uint32_t)a;
            key[0] += 0x9E3779B9u;
            key[1] += 0xBB67AE85u;
        }
        for (int j = 0; j < 4; j++) {
            dropout[2 * j * words + i] = (x[j] & 0xFFFF) < p->keep_threshold;
            dropout[(2 * j + 1) * words + i] = (x[j] >> 16) < p->keep_threshold;
        }
    }
}

/* Write softmax(q k' / sqrt(D)) of the queries and the keys of a block to `probs` (s.rows, keys.rows), without dropout,
   and the transposed keys k' to `transposed` (D, keys.rows). With a band, the keys beyond it become 0; there are only
   near keys then. */
static void block_softmax(const problem *p, span s, key_span keys, const float *q, const float *k, float *transposed,
                          float *probs) {
    const int64_t m = keys.rows;
    transpose(m, D, k, transposed);
    multiply(0, s.rows, m, D, q, D, 1, transposed, 1 / sqrtf(D), probs, NULL);
    for (int64_t i = 0; i < s.rows; i++) {
        float *row = probs + i * m;
        int64_t first = 0;
        int64_t end = m;
        if (p->band >= 0) {
            const int64_t place = s.start + i - keys.near.start; /* of the query among the keys */
            first = place < p->band ? 0 : place - p->band;
            end = place + p->band + 1 < m ? place + p->band + 1 : m;
            memset(row, 0, first * sizeof(float));
            memset(row + end, 0, (m - end) * sizeof(float));
        }
        softmax(end - first, keys.valid ? keys.valid + first : NULL, row + first);
    }
}

/* Return diag_weight, divided by the probability of keeping if there is dropout. */
static float scaled_diag_weight(const problem *p) {
    return p->keep_threshold ? p->diag_weight * 65536 / p->keep_threshold : p->diag_weight;
}

/* Add the block-diagonal part of the output of a tile to `out`: diag_weight * P v, with P the softmax after dropout. */
static void block_forward(const problem *p, span s, scratch c, const float *q, float *out) {
    const key_span keys = keys_of_block(p, s, c);
    const float *k = load_block_keys(&p->k, keys, c.k);
    const float *v = load_block_keys(&p->v, keys, c.v);
    const int64_t m = keys.rows;
    float *probs = c.probs;
    float *dropout = c.dropout;
    block_softmax(p, s, keys, q, k, c.transposed, probs);
    if (p->keep_threshold) {
        draw_dropout(p, s, 0, s.rows * m, dropout);
        for (int64_t i = 0; i < s.rows * m; i++) probs[i] *= dropout[i];
    }
    multiply(1, s.rows, D, m, probs, m, 1, v, scaled_diag_weight(p), out, PREFETCH(s, &p->k, &p->v));
}

/* Add the block-diagonal part to the gradients of a block. The gradients of its near keys and values are in the tiles
   grad_k and grad_v, the gradient of q is in the tensor, and those of the global keys are in c.global_grad_k and
   c.global_grad_v. With the probabilities P and the gradient dscores of q k':

     dv += P' do        dq += dscores k        dk += dscores' q */
static void block_backward(const problem *p, span s, scratch c, float *grad_k, float *grad_v) {
    const key_span keys = keys_of_block(p, s, c);
    const float *k = load_block_keys(&p->k, keys, c.k);
    const float *v = load_block_keys(&p->v, keys, c.v);
    const float *q = load_queries(&p->q, s, own_marks(s, keys), c.q);
    const float *grad_out = load_block_gradient(p, s, c.grad_out);
    float *grad_q = load_tile(&p->grad_q, s, NULL, 0, c.grad_q);
    const int64_t n = s.rows;
    const int64_t w = keys.near.rows;
    const int64_t g = keys.global.rows;
    const int64_t m = keys.rows;
    const float weight = scaled_diag_weight(p);
    const float scale = weight / sqrtf(D);
    float *probs = c.probs;
    float *grad_probs = c.grad_probs;
    float *dropout = c.dropout;
    float *dropped_probs = probs;
    block_softmax(p, s, keys, q, k, c.transposed, probs);
    transpose(m, D, v, c.transposed);
    multiply(0, n, m, D, grad_out, D, 1, c.transposed, 1, grad_probs, PREFETCH(s, &p->q, &p->out));
    if (p->keep_threshold) {
        draw_dropout(p, s, 0, n * m, dropout);
        dropped_probs = dropout;
        for (int64_t i = 0; i < n * m; i++) {
            grad_probs[i] *= dropout[i];
            dropped_probs[i] *= probs[i];
        }
    }
    multiply(1, w, D, n, dropped_probs, 1, m, grad_out, weight, grad_v, PREFETCH(s, &p->grad_q));
    if (g) multiply(1, g, D, n, dropped_probs + w, 1, m, grad_out, weight, c.global_grad_v, NULL);
    for (int64_t i = 0; i < n; i++) softmax_backward(m, probs + i * m, grad_probs + i * m);
    multiply(1, n, D, m, grad_probs, m, 1, k, scale, grad_q, NULL);
    multiply(1, w, D, n, grad_probs, 1, m, q, scale, grad_k, NULL);
    if (g) multiply(1, g, D, n, grad_probs + w, 1, m, q, scale, c.global_grad_k, NULL);
    store_tile(&p->grad_q, s, grad_q);
}

/* Add the block-diagonal part to the gradients of a head whose blocks reach others. A key has a part of its gradients
   from each of several blocks, so all of them are in the tensors before. */
static void window_backward(const problem *p, int64_t head, scratch c) {
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const span near = keys_of_block(p, s, c).near;
        float *grad_k = load_tile(&p->grad_k, near, NULL, 0, c.grad_k);
        float *grad_v = load_tile(&p->grad_v, near, NULL, 0, c.grad_v);
        block_backward(p, s, c, grad_k, grad_v);
        store_tile(&p->grad_k, near, grad_k);
        store_tile(&p->grad_v, near, grad_v);
    }
}
