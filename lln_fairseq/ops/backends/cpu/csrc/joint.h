/* The joint form of LLN+Diag. The formulas and symbols are those of ops/formula.py and backends/torch.py. Each
   tile is a block, and block_keys.h has its keys. */

/* Return a pointer to a part of L of a head: the maximum of beta k_j, or the sum of e^(beta k_j - maximum). */
static float *key_max_of_head(const problem *p, int64_t head) { return log_sum_of_head(p, head) + D; }
static float *key_sum_of_head(const problem *p, int64_t head) { return log_sum_of_head(p, head) + 2 * D; }

/* Return how many of the `count` tokens that begin at token `start` are not padding. */
static int64_t count_real_keys(const problem *p, int64_t head, int64_t start, int64_t count) {
    if (p->padding == NULL) return count;
    const uint8_t *padding = p->padding + head / p->heads * p->tokens + start;
    int64_t real = 0;
    for (int64_t j = 0; j < count; j++) real += !padding[j];
    return real;
}

/* The quantities that decide the weight c of the keys outside a block, apart from u. */
typedef struct {
    int has_all_keys;       /* 1 if all keys of the sequence that are not padding lie in the block, and there are any */
    int has_no_key;         /* 1 if all keys of the block are padding */
    float exp_minus_offset; /* e^-o */
} block_rule;

/* Return the rule of a block. real_keys is the number of keys of the sequence that are not padding. */
static block_rule rule_of_block(const problem *p, int64_t head, key_span keys, int64_t real_keys) {
    const int64_t inside = count_real_keys(p, head, keys.near.start, keys.near.count)
                           + count_real_keys(p, head, keys.global.start, keys.global.count);
    return (block_rule){inside == real_keys && inside, !inside, expf(-p->offset[head])};
}

/* The weight c of the keys outside the block, and its derivatives by u and by the offset. */
typedef struct {
    float weight, by_u, by_offset;
} outside;

/* Return c and its derivatives by u and by the offset. The derivatives are 0 where c is constant: in blocks with all
   keys or no key, and where the divisor of c is at most FLOOR. */
static inline outside outside_weight(block_rule rule, float u) {
    if (rule.has_all_keys) return (outside){0, 0, 0};
    if (rule.has_no_key) return (outside){1, 0, 0};
    const float divisor = u + (1 - u) * rule.exp_minus_offset;
    const int is_floored = !(divisor > FLOOR);
    const float weight = 1 / (is_floored ? FLOOR : divisor);
    const float by_u = is_floored ? 0 : -weight * weight * (1 - rule.exp_minus_offset);
    const float by_offset = is_floored ? 0 : weight * (1 - weight * u);
    return (outside){weight, by_u, by_offset};
}

/* Return u = 1 - inside_mass, clamped to [0, 1], which it can leave by rounding. */
static inline float outside_mass(float inside_mass) {
    if (inside_mass < 0) return 1;
    if (inside_mass > 1) return 0;
    return 1 - inside_mass;
}

static inline float sum(int64_t n, const float *x) {
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}

/* Replace the transposed keys k' in w_T (D, n) by W', bit for bit the W that S was computed from: e^(beta k - L) would
   differ from that W by the rounding of a large L. */
static void key_features_T(const problem *p, int64_t head, int64_t n, const float *valid, float *w_T) {
    const float beta = p->beta[head];
    const float *key_max = key_max_of_head(p, head);
    const float *key_sum = key_sum_of_head(p, head);
    for (int d = 0; d < D; d++) {
        const float shift = key_max[d];
        const float inverse = 1 / key_sum[d];
        float *w = w_T + d * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) w[j] = exponential(beta * w[j] - shift) * inverse;
        if (valid == NULL) continue;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) w[j] *= valid[j];
    }
}

static inline void scale_row(int64_t n, float factor, float *x) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* Write the output of a block to `out`: c A S + (inner Diag - c M) v. real_keys is the number of keys of the sequence
   that are not padding. */
static void joint_forward(const problem *p, int64_t head, span s, scratch c, const float *q, int64_t real_keys,
                          float *out) {
    const key_span keys = keys_of_block(p, s, c);
    const float *k = load_block_keys(&p->k, keys, c.k);
    const float *v = load_block_keys(&p->v, keys, c.v);
    const int64_t n = s.rows;
    const int64_t m = keys.rows;
    const block_rule rule = rule_of_block(p, head, keys, real_keys);
    const float rescale = scaled_diag_weight(p);
    float *a = c.features;
    float *probs = c.probs;
    float *lln_probs = c.lln_probs;
    block_softmax(p, s, keys, q, k, c.transposed, probs);
    key_features_T(p, head, m, keys.valid, c.transposed);
    query_features(s, q, p->alpha[head], log_sum_of_head(p, head), a);
    multiply(0, n, m, D, a, D, 1, c.transposed, 1, lln_probs, NULL);
    if (p->keep_threshold) {
        draw_dropout(p, s, 0, n * m, c.dropout);
        for (int64_t i = 0; i < n * m; i++) probs[i] *= c.dropout[i];
    }
    for (int64_t i = 0; i < n; i++) {
        float *row = probs + i * m;
        float *lln_row = lln_probs + i * m;
        const float u = outside_mass(sum(m, lln_row));
        const float outer = outside_weight(rule, u).weight;
        const float inner = (1 - outer * u) * rescale;
#pragma omp simd
        for (int64_t j = 0; j < m; j++) row[j] = inner * row[j] - outer * lln_row[j];
        scale_row(D, outer, a + i * D);
    }
    multiply(0, n, D, D, a, D, 1, state_of_head(p, head), 1, out, PREFETCH(s, &p->q, &p->out));
    multiply(1, n, D, m, probs, m, 1, v, 1, out, PREFETCH(s, &p->k, &p->v));
}

/* Compute the backward pass of one row of a block, which belongs to one query. The row has n keys. In place:

     p_row   in: the softmax, before dropout    out: the gradient of the scores
     e_row   in: E = do v'                      out: dM
     m_row   in: M                              out: inner Diag - c M, which multiplies do in the gradient of v
     grad_a  in: do S'                          out: c do S'

   dropout_row is read only if has_dropout is true. Store c in `weight`. Return the query's part of the gradient of the
   offset. */
static inline __attribute__((always_inline)) float joint_row_backward(
    block_rule rule, int64_t n, const int has_dropout, const float *dropout_row, float rescale, const float *a,
    float *grad_a, float *p_row, float *e_row, float *m_row, float *weight) {
    float diag_e = 0;
    float mass = 0;
    float outside_e = 0;
#pragma omp simd reduction(+ : diag_e, mass, outside_e)
    for (int64_t j = 0; j < n; j++) {
        diag_e += has_dropout ? rescale * dropout_row[j] * p_row[j] * e_row[j] : p_row[j] * e_row[j];
        mass += m_row[j];
        outside_e -= m_row[j] * e_row[j];
    }
    outside_e += dot(D, a, grad_a);
    const float u = outside_mass(mass);
    const outside o = outside_weight(rule, u);
    const float inner = 1 - o.weight * u;
    const float grad_u = o.by_u * outside_e - (o.weight + o.by_u * u) * diag_e;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const float factor = has_dropout ? inner * rescale * dropout_row[j] : inner;
        const float prob = p_row[j];
        const float e = e_row[j];
        m_row[j] = factor * prob - o.weight * m_row[j];
        p_row[j] = prob * (factor * e - inner * diag_e);
        e_row[j] = -(o.weight * e + grad_u);
    }
    *weight = o.weight;
    scale_row(D, o.weight, grad_a);
    return o.by_offset * (outside_e - u * diag_e);
}

/* Write dq = alpha dx of a tile to grad_q, where dx = A (dA - δ), dA is grad_a and A is `a`. Add Σ_i A δ to g. Then
   replace A in `a` by c A, with c from `weight`. Return the tile's part of dalpha = Σ q dx. */
static float joint_queries_backward(span s, const float *q, float alpha, const float *weight, float *a,
                                    const float *grad_a, float *grad_q, float *g) {
    float grad_alpha[D] = {0};
    float total[D] = {0};
    for (int64_t i = 0; i < s.rows; i++, a += D, grad_a += D) {
        const float delta = dot(D, a, grad_a);
        const float *x = q + i * D;
        float *to = grad_q + i * D;
#pragma omp simd
        for (int d = 0; d < D; d++) {
            const float grad_x = a[d] * (grad_a[d] - delta);
            total[d] += a[d] * delta;
            grad_alpha[d] += x[d] * grad_x;
            to[d] = alpha * grad_x;
            a[d] *= weight[i];
        }
    }
    for (int d = 0; d < D; d++) g[d] += total[d];
    return sum(D, grad_alpha);
}

/* Replace dW, the n numbers in grad_k, by dk = beta dy with dy = W dW. Return Σ k dy, a part of dbeta. */
static float joint_keys_backward(int64_t n, const float *k, const float *w, float beta, float *grad_k) {
    float grad_beta = 0;
#pragma omp simd reduction(+ : grad_beta)
    for (int64_t j = 0; j < n; j++) {
        const float grad_y = w[j] * grad_k[j];
        grad_beta += k[j] * grad_y;
        grad_k[j] = beta * grad_y;
    }
    return grad_beta;
}

typedef struct {
    double alpha, beta, offset;
} scalar_gradients;

/* Compute the first half of the backward pass of a block. Write the gradient of q to the tensor, and the parts of the
   gradients of k and v that come from the block's own queries. Add the block's parts of dS to c.grad_state, of g to
   c.g, of the gradients of the global keys to c.global_grad_k and c.global_grad_v, and of dalpha, dbeta and the
   gradient of the offset to `sums`. */
static void joint_block_backward(const problem *p, int64_t head, span s, scratch c, int64_t real_keys,
                                 scalar_gradients *sums) {
    const key_span keys = keys_of_block(p, s, c);
    const float *k = load_block_keys(&p->k, keys, c.k);
    const float *v = load_block_keys(&p->v, keys, c.v);
    const float *q = load_queries(&p->q, s, keys.valid, c.q);
    const float *grad_out = load_block_gradient(p, s, c.grad_out);
    float *grad_q = output_tile(&p->grad_q, s, c.grad_q);
    float *grad_k = output_block_keys(&p->grad_k, keys, c.grad_k);
    float *grad_v = output_block_keys(&p->grad_v, keys, c.grad_v);
    const int64_t n = s.rows;
    const int64_t m = keys.rows;
    const float beta = p->beta[head];
    const float rescale = scaled_diag_weight(p);
    const float scale = 1 / sqrtf(D);
    const block_rule rule = rule_of_block(p, head, keys, real_keys);
    float *a = c.features;
    float *w = c.out;
    float *grad_a = c.grad_logits;
    float *probs = c.probs;
    float *e = c.grad_probs;
    float *lln_probs = c.lln_probs;

    block_softmax(p, s, keys, q, k, c.transposed, probs);
    key_features_T(p, head, m, keys.valid, c.transposed);
    transpose(D, m, c.transposed, w);
    query_features(s, q, p->alpha[head], log_sum_of_head(p, head), a);
    multiply(0, n, m, D, a, D, 1, c.transposed, 1, lln_probs, PREFETCH(s, &p->grad_k, &p->grad_v));
    transpose(m, D, v, c.transposed);
    multiply(0, n, m, D, grad_out, D, 1, c.transposed, 1, e, PREFETCH(s, &p->k, &p->v));
    multiply(0, n, D, D, grad_out, D, 1, c.state_T, 1, grad_a, PREFETCH(s, &p->q, &p->out));
    if (p->keep_threshold) draw_dropout(p, s, 0, n * m, c.dropout);
    /* A constant for has_dropout lets the compiler specialize the loop. */
#define ROWS_BACKWARD(has_dropout)                                                                             \
    for (int64_t i = 0; i < n; i++)                                                                            \
        sums->offset += joint_row_backward(rule, m, has_dropout, c.dropout + i * m, rescale, a + i * D,        \
                                           grad_a + i * D, probs + i * m, e + i * m, lln_probs + i * m,        \
                                           c.outside_weight + i);
    if (p->keep_threshold) { ROWS_BACKWARD(1) } else { ROWS_BACKWARD(0) }
    const float *grad_scores = probs;
    const float *x = e;
    const float *value_weights = lln_probs;

    multiply(1, n, D, m, x, m, 1, w, 1, grad_a, PREFETCH(s, &p->grad_q));
    multiply(0, m, D, n, value_weights, 1, m, grad_out, 1, grad_v, NULL);
    multiply(0, m, D, n, x, 1, m, a, 1, grad_k, NULL);
    sums->beta += joint_keys_backward(m * D, k, w, beta, grad_k);
    sums->alpha += joint_queries_backward(s, q, p->alpha[head], c.outside_weight, a, grad_a, grad_q, c.g);
    multiply(1, D, D, n, a, 1, D, grad_out, 1, c.grad_state, NULL);
    multiply(1, n, D, m, grad_scores, m, 1, k, scale, grad_q, NULL);
    multiply(1, m, D, n, grad_scores, 1, m, q, scale, grad_k, NULL);
    store_tile(&p->grad_q, s, grad_q);
    store_block_keys(&p->grad_k, keys, grad_k, c.global_grad_k);
    store_block_keys(&p->grad_v, keys, grad_v, c.global_grad_v);
}

/* Store all gradients of a head. */
static void joint_backward(const problem *p, int64_t head, scratch c) {
    const int64_t real_keys = count_real_keys(p, head, 0, p->tokens);
    scalar_gradients sums = {0};
    transpose(D, D, state_of_head(p, head), c.state_T);
    memset(c.grad_state, 0, D * D * sizeof(float));
    memset(c.g, 0, D * sizeof(float));
    clear_global_gradients(p, c);
    for (int64_t start = 0; start < p->tokens; start += p->tile_size)
        joint_block_backward(p, head, tile_at(p, head, start), c, real_keys, &sums);
    add_global_gradients(p, head, c);

    /* S was computed from W = e^(beta k - key_max) / key_sum. Dividing dS and g by key_sum here lets keys_backward work
       with e^(beta k - key_max). */
    const float *key_sum = key_sum_of_head(p, head);
    for (int d = 0; d < D; d++) {
        scale_row(D, 1 / key_sum[d], c.grad_state + d * D);
        c.g[d] /= key_sum[d];
    }
    float *grad_state_T = c.state_T; /* S' is not needed any more */
    transpose(D, D, c.grad_state, grad_state_T);
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *valid = valid_tokens(p, s, c.valid);
        const float *k = load_keys(&p->k, s, valid, c.k);
        const float *v = load_keys(&p->v, s, valid, c.v);
        float *grad_k = load_tile(&p->grad_k, s, NULL, 0, c.grad_k);
        float *grad_v = load_tile(&p->grad_v, s, NULL, 0, c.grad_v);
        sums.beta += keys_backward(p, head, s, c, 1, key_max_of_head(p, head), k, v, grad_k, grad_v);
        store_tile(&p->grad_k, s, grad_k);
        store_tile(&p->grad_v, s, grad_v);
    }
    if (p->grad_alpha) p->grad_alpha[head] = sums.alpha;
    if (p->grad_beta) p->grad_beta[head] = sums.beta;
    if (p->grad_offset) p->grad_offset[head] = sums.offset;
}
