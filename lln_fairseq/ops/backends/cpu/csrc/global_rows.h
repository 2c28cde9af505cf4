/* Softmax attention of the global queries to all keys of the sequence: the first rows of the output of a head.

   The keys are divided into parts, which different threads may compute, and a part into tiles of ROW_TILE keys. Since
   parts and tiles depend only on the number of tokens, the number of threads does not change a bit of the results.
   What a part computes for all g rows is kept in p->row_parts until the parts are put together. */

enum { DROPOUT_OF_ROWS = 1 }; /* the stream of their random numbers */

/* Return the tile of the global queries of a head. */
static span global_queries(const problem *p, int64_t head) {
    const int64_t batch = head / p->heads;
    const int64_t count = global_tokens_of(p, batch);
    return (span){batch, head % p->heads, 0, count, round_up(count)};
}

/* Return the tile of keys of a head that begins at token `start`, in the part that ends before token `end`. */
static span row_tile_at(const problem *p, int64_t head, int64_t start, int64_t end) {
    const int64_t count = end - start < ROW_TILE ? end - start : ROW_TILE;
    return (span){head / p->heads, head % p->heads, start, count, round_up(count)};
}

static int64_t end_of_part(const problem *p, int64_t part) {
    const int64_t end = (part + 1) * p->part_tokens;
    return end < p->tokens ? end : p->tokens;
}

/* What a part has computed: `sums` (g, D), and the maximum and the sum (g) of its softmax. */
typedef struct {
    float *sums, *max, *total;
} row_part;

static row_part part_at(const problem *p, int64_t head, int64_t part) {
    const int64_t g = round_up(p->max_global);
    float *sums = p->row_parts + (head * p->parts + part) * g * (D + 2);
    return (row_part){sums, sums + g * D, sums + g * (D + 1)};
}

/* Add the scores x of a row with n keys to its softmax: replace them by e^(score - maximum), and rescale the total and
   the D sums if the maximum rises. */
static inline void softmax_step(int64_t n, const float *valid, float *x, float *max, float *total, float *sums) {
    float row_max = *max;
    float row_total = 0;
    if (valid == NULL) {
#pragma omp simd reduction(max : row_max)
        for (int64_t j = 0; j < n; j++) row_max = x[j] > row_max ? x[j] : row_max;
#pragma omp simd reduction(+ : row_total)
        for (int64_t j = 0; j < n; j++) {
            x[j] = exponential(x[j] - row_max);
            row_total += x[j];
        }
    } else {
#pragma omp simd reduction(max : row_max)
        for (int64_t j = 0; j < n; j++) {
            const float y = valid[j] > 0 ? x[j] : -INFINITY;
            row_max = y > row_max ? y : row_max;
        }
#pragma omp simd reduction(+ : row_total)
        for (int64_t j = 0; j < n; j++) {
            x[j] = exponential(x[j] - row_max) * valid[j];
            row_total += x[j];
        }
    }
    if (row_max > *max) {
        const float factor = exponential(*max - row_max);
        *total *= factor;
#pragma omp simd
        for (int d = 0; d < D; d++) sums[d] *= factor;
        *max = row_max;
    }
    *total += row_total;
}

/* Compute a part of the rows of a head: the sums of e^(score - maximum) v after dropout, the maxima and the totals. */
static void rows_forward(const problem *p, int64_t head, int64_t part, scratch c) {
    const span queries = global_queries(p, head);
    if (queries.count == 0) return;
    const float *q = load_queries(&p->q, queries, valid_tokens(p, queries, c.row_valid), c.row_q);
    const row_part r = part_at(p, head, part);
    const int64_t n = queries.rows;
    const int64_t end = end_of_part(p, part);
    float *probs = c.row_probs;
    memset(r.sums, 0, n * D * sizeof(float));
    memset(r.total, 0, n * sizeof(float));
    for (int64_t i = 0; i < n; i++) r.max[i] = -1e30f;
    for (int64_t start = part * p->part_tokens; start < end; start += ROW_TILE) {
        const span s = row_tile_at(p, head, start, end);
        const int64_t m = s.rows;
        const float *valid = valid_tokens(p, s, c.row_valid);
        const float *k = load_keys(&p->k, s, valid, c.row_k);
        const float *v = load_keys(&p->v, s, valid, c.row_v);
        transpose(m, D, k, c.row_transposed);
        multiply(0, n, m, D, q, D, 1, c.row_transposed, 1 / sqrtf(D), probs, NULL);
        for (int64_t i = 0; i < n; i++) softmax_step(m, valid, probs + i * m, r.max + i, r.total + i, r.sums + i * D);
        if (p->keep_threshold) {
            draw_dropout(p, s, DROPOUT_OF_ROWS, n * m, c.row_dropout);
            for (int64_t i = 0; i < n * m; i++) probs[i] *= c.row_dropout[i];
        }
        multiply(1, n, D, m, probs, m, 1, v, 1, r.sums, NULL);
    }
}

/* Put the parts of the rows of a head together, write the rows to the output, and save them, the maxima of their
   scores, and the inverse of the sums of e^(score - maximum), which is 0 for a sequence that is all padding. What is saved
   of the remaining rows is 0. */
static void finish_rows_forward(const problem *p, int64_t head, scratch c) {
    const span queries = global_queries(p, head);
    const float scale = p->keep_threshold ? 65536.0f / p->keep_threshold : 1;
    float *rows = p->rows + head * p->max_global * D;
    float *row_max = p->row_stats + head * 2 * p->max_global;
    float *inverse = row_max + p->max_global;
    memset(rows, 0, p->max_global * D * sizeof(float));
    memset(row_max, 0, 2 * p->max_global * sizeof(float));
    for (int64_t i = 0; i < queries.count; i++) {
        float *row = rows + i * D;
        float max = -1e30f;
        float total = 0;
        for (int64_t part = 0; part < p->parts; part++) {
            const float part_max = part_at(p, head, part).max[i];
            max = part_max > max ? part_max : max;
        }
        for (int64_t part = 0; part < p->parts; part++) {
            const row_part r = part_at(p, head, part);
            const float factor = exponential(r.max[i] - max);
            total += factor * r.total[i];
#pragma omp simd
            for (int d = 0; d < D; d++) row[d] += factor * r.sums[i * D + d];
        }
        row_max[i] = max;
        inverse[i] = total == 0 ? 0 : 1 / total;
#pragma omp simd
        for (int d = 0; d < D; d++) row[d] *= scale * inverse[i];
        memcpy(first_token(&p->out, queries) + i * p->out.token, row, D * sizeof(float));
    }
}

/* Add what the rows of a head contribute to the gradients of a part of its keys and values, and compute the part's sums
   of the gradients of the queries. With the probabilities P and the gradient dscores of q k':

     dv += P' do        dq = dscores k        dk += dscores' q */
static void rows_backward(const problem *p, int64_t head, int64_t part, scratch c) {
    const span queries = global_queries(p, head);
    if (queries.count == 0) return;
    const float *q = load_queries(&p->q, queries, valid_tokens(p, queries, c.row_valid), c.row_q);
    const float *grad_out = load_tile(&p->out, queries, NULL, 0, c.row_grad_out);
    const float *rows = p->rows + head * p->max_global * D;
    const float *row_max = p->row_stats + head * 2 * p->max_global;
    const float *inverse = row_max + p->max_global;
    const int64_t n = queries.rows;
    const int64_t end = end_of_part(p, part);
    const float scale = 1 / sqrtf(D);
    const float rescale = p->keep_threshold ? 65536.0f / p->keep_threshold : 1;
    float *grad_q = part_at(p, head, part).sums;
    float *probs = c.row_probs;
    float *grad_probs = c.row_grad_probs;
    float *dropped_probs = p->keep_threshold ? c.row_dropout : probs;
    memset(grad_q, 0, n * D * sizeof(float));
    for (int64_t start = part * p->part_tokens; start < end; start += ROW_TILE) {
        const span s = row_tile_at(p, head, start, end);
        const int64_t m = s.rows;
        const float *valid = valid_tokens(p, s, c.row_valid);
        const float *k = load_keys(&p->k, s, valid, c.row_k);
        const float *v = load_keys(&p->v, s, valid, c.row_v);
        float *grad_k = load_tile(&p->grad_k, s, NULL, 0, c.row_grad_k);
        float *grad_v = load_tile(&p->grad_v, s, NULL, 0, c.row_grad_v);
        transpose(m, D, k, c.row_transposed);
        multiply(0, n, m, D, q, D, 1, c.row_transposed, scale, probs, PREFETCH(s, &p->k, &p->v));
        transpose(m, D, v, c.row_transposed);
        multiply(0, n, m, D, grad_out, D, 1, c.row_transposed, rescale, grad_probs, PREFETCH(s, &p->grad_k, &p->grad_v));
        if (p->keep_threshold) draw_dropout(p, s, DROPOUT_OF_ROWS, n * m, c.row_dropout);
        for (int64_t i = 0; i < n; i++) {
            float *prob = probs + i * m;
            float *grad_prob = grad_probs + i * m;
            if (i >= queries.count) {
                memset(prob, 0, m * sizeof(float));
                memset(grad_prob, 0, m * sizeof(float));
                if (p->keep_threshold) memset(dropped_probs + i * m, 0, m * sizeof(float));
                continue;
            }
            const float delta = dot(D, grad_out + i * D, rows + i * D);
#pragma omp simd
            for (int64_t j = 0; j < m; j++) prob[j] = exponential(prob[j] - row_max[i]) * inverse[i];
            if (valid) {
#pragma omp simd
                for (int64_t j = 0; j < m; j++) prob[j] *= valid[j];
            }
            if (p->keep_threshold) {
                float *dropped = dropped_probs + i * m;
#pragma omp simd
                for (int64_t j = 0; j < m; j++) {
                    grad_prob[j] *= dropped[j];
                    dropped[j] *= prob[j];
                }
            }
#pragma omp simd
            for (int64_t j = 0; j < m; j++) grad_prob[j] = prob[j] * (grad_prob[j] - delta);
        }
        multiply(1, m, D, n, dropped_probs, 1, m, grad_out, rescale, grad_v, NULL);
        multiply(1, n, D, m, grad_probs, m, 1, k, scale, grad_q, NULL);
        multiply(1, m, D, n, grad_probs, 1, m, q, scale, grad_k, NULL);
        store_tile(&p->grad_k, s, grad_k);
        store_tile(&p->grad_v, s, grad_v);
    }
}

/* Write the gradients of the global queries of a head, the sums over the parts. */
static void finish_rows_backward(const problem *p, int64_t head, scratch c) {
    const span queries = global_queries(p, head);
    for (int64_t i = 0; i < queries.count; i++) {
        float *grad_q = first_token(&p->grad_q, queries) + i * p->grad_q.token;
        memset(grad_q, 0, D * sizeof(float));
        for (int64_t part = 0; part < p->parts; part++) {
            const float *sums = part_at(p, head, part).sums + i * D;
#pragma omp simd
            for (int d = 0; d < D; d++) grad_q[d] += sums[d];
        }
    }
}
