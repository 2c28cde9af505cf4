/* LLN attention. The formulas and symbols are those of ops/head_groups.py; x' is the transpose of x. */

/* Write A = softmax_d(alpha q + L) of a tile of queries to `a`. */
static void query_features(span s, const float *q, float alpha, const float *log_sum, float *a) {
    for (int64_t i = 0; i < s.rows; i++, a += D) {
        const float *x = q + i * D;
#pragma omp simd
        for (int d = 0; d < D; d++) a[d] = alpha * x[d] + log_sum[d];
        softmax(D, NULL, a);
    }
}

/* Write exp(beta k - shift) of a tile of keys to `w`, with 0 for padding keys. If shift is L, this is W. */
static void key_features(span s, const float *k, float beta, const float *shift, const float *valid, float *w) {
    for (int64_t j = 0; j < s.rows; j++, w += D) {
        const float *x = k + j * D;
        if (valid && !valid[j]) {
            memset(w, 0, D * sizeof(float));
            continue;
        }
#pragma omp simd
        for (int d = 0; d < D; d++) w[d] = exponential(beta * x[d] - shift[d]);
    }
}

/* Add the sum of the rows of w to key_sum. The rows are summed separately first, because adding 10^5 tokens one by one
   would lose a digit. */
static void add_key_features(span s, const float *w, float *key_sum) {
    float sum[D] = {0};
    for (int64_t j = 0; j < s.rows; j++)
#pragma omp simd
        for (int d = 0; d < D; d++) sum[d] += w[j * D + d];
    for (int d = 0; d < D; d++) key_sum[d] += sum[d];
}

/* Raise the running maximum key_max to the largest beta k of the tile if that is larger. Then rescale key_sum and
   `state`, which are relative to the old maximum. `factor` (D) is scratch memory. */
static void raise_key_max(span s, const float *k, float beta, const float *valid, float *key_max, float *key_sum,
                          float *state, float *factor) {
    memcpy(factor, key_max, D * sizeof(float));
    for (int64_t j = 0; j < s.rows; j++) {
        const float *x = k + j * D;
        if (valid && !valid[j]) continue;
#pragma omp simd
        for (int d = 0; d < D; d++) key_max[d] = beta * x[d] > key_max[d] ? beta * x[d] : key_max[d];
    }
    if (!memcmp(factor, key_max, D * sizeof(float))) return;
#pragma omp simd
    for (int d = 0; d < D; d++) {
        factor[d] = exponential(factor[d] - key_max[d]);
        key_sum[d] *= factor[d];
    }
    for (int d = 0; d < D; d++)
        for (int e = 0; e < D; e++) state[d * D + e] *= factor[d];
}

/* Store S = lln_weight * W' v of a head, L = logsumexp_j(beta k_j), and the two parts of L: the maximum of beta k_j and
   the sum of e^(beta k_j - maximum). For a sequence that is all padding, the sum is 1 and everything else 0. */
static void sum_keys(const problem *p, int64_t head, scratch c) {
    float *log_sum = log_sum_of_head(p, head);
    float *state = state_of_head(p, head);
    float *key_max = c.key_max;
    float *key_sum = c.key_sum;
    int has_real_key = 0;
    memset(state, 0, D * D * sizeof(float));
    for (int d = 0; d < D; d++) {
        key_max[d] = -1e30f;
        key_sum[d] = 0;
    }
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *valid = valid_tokens(p, s, c.valid);
        for (int64_t j = 0; j < s.rows && !has_real_key; j++) has_real_key = !valid || valid[j];
        const float *k = load_keys(&p->k, s, valid, c.k);
        const float *v = load_keys(&p->v, s, valid, c.v);
        raise_key_max(s, k, p->beta[head], valid, key_max, key_sum, state, c.factor);
        key_features(s, k, p->beta[head], key_max, valid, c.features);
        add_key_features(s, c.features, key_sum);
        multiply(1, D, D, s.rows, c.features, 1, D, v, 1, state, PREFETCH(s, &p->k, &p->v));
    }
    for (int d = 0; d < D; d++) {
        const float factor = has_real_key ? p->lln_weight / key_sum[d] : 0;
        log_sum[d] = has_real_key ? key_max[d] + logf(key_sum[d]) : 0;
        log_sum[D + d] = has_real_key ? key_max[d] : 0;
        log_sum[2 * D + d] = has_real_key ? key_sum[d] : 1;
        for (int e = 0; e < D; e++) state[d * D + e] *= factor;
    }
}

/* Store the gradients of q and alpha of a head: dA = do S', dx = A (dA - Σ_d A dA), dq = alpha dx, dalpha = Σ q dx. The
   gradient of alpha is stored only if p->grad_alpha is not NULL. On return, c.grad_state is dS = A' do, c.g is
   g = diag(S dS') - Σ_i dx_i, and c.state_T is S'. */
static void queries_backward(const problem *p, int64_t head, scratch c) {
    float *state = state_of_head(p, head);
    float *g = c.g;
    float *a = c.features;
    float *grad_x = c.grad_logits;
    const float alpha = p->alpha[head];
    double grad_alpha = 0;
    transpose(D, D, state, c.state_T);
    memset(c.grad_state, 0, D * D * sizeof(float));
    memset(g, 0, D * sizeof(float));
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *valid = valid_tokens(p, s, c.valid);
        const float *q = load_queries(&p->q, s, valid, c.q);
        const float *grad_out = load_tile(&p->out, s, NULL, 0, c.grad_out);
        float *grad_q = output_tile(&p->grad_q, s, c.grad_q);
        query_features(s, q, alpha, log_sum_of_head(p, head), a);
        multiply(0, s.rows, D, D, grad_out, D, 1, c.state_T, 1, grad_x, PREFETCH(s, &p->q, &p->out));
        multiply(1, D, D, s.rows, a, 1, D, grad_out, 1, c.grad_state, PREFETCH(s, &p->grad_q));
        for (int64_t i = 0; i < s.rows; i++) {
            const float *row = grad_x + i * D;
            float *to = grad_q + i * D;
            softmax_backward(D, a + i * D, grad_x + i * D);
#pragma omp simd
            for (int d = 0; d < D; d++) {
                g[d] -= row[d];
                to[d] = alpha * row[d];
            }
            if (p->grad_alpha) grad_alpha += dot(D, q + i * D, row);
        }
        store_tile(&p->grad_q, s, grad_q);
    }
    for (int d = 0; d < D; d++) g[d] += dot(D, state + d * D, c.grad_state + d * D);
    if (p->grad_alpha) p->grad_alpha[head] = grad_alpha;
}

/* Compute the gradients of a tile of keys and values, with W = e^(beta k - shift) and λ = lln_weight:

     dv = λ W dS        dy = W (λ v dS' - g)        dk = beta dy

   dS is in c.grad_state, dS' in c.state_T and g in c.g. The results overwrite grad_k and grad_v, or are added to them
   if `add` is true. Return the tile's part of dbeta = Σ k dy, or 0 if p->grad_beta is NULL. */
static inline float keys_backward(const problem *p, int64_t head, span s, scratch c, const int add, const float *shift,
                                  const float *k, const float *v, float *grad_k, float *grad_v) {
    float *w = c.features;
    float *grad_y = c.grad_logits;
    float grad_beta = 0;
    const float beta = p->beta[head];
    key_features(s, k, beta, shift, valid_tokens(p, s, c.valid), w);
    multiply(add, s.rows, D, D, w, D, 1, c.grad_state, p->lln_weight, grad_v, PREFETCH(s, &p->k, &p->v));
    multiply(0, s.rows, D, D, v, D, 1, c.state_T, p->lln_weight, grad_y, PREFETCH(s, &p->grad_k, &p->grad_v));
    for (int64_t j = 0; j < s.rows; j++) {
        float *row = grad_y + j * D;
        float *to = grad_k + j * D;
#pragma omp simd
        for (int d = 0; d < D; d++) {
            row[d] = w[j * D + d] * (row[d] - c.g[d]);
            to[d] = (add ? to[d] : 0) + beta * row[d];
        }
        if (p->grad_beta) grad_beta += dot(D, k + j * D, row);
    }
    return grad_beta;
}
