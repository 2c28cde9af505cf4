/* Moment matching. The formulas are those of ops/moment_matching.py. */

/* Return the population standard deviation over the features and the tokens of a head, without padding tokens; at least
   MIN_SIGMA. The sums are relative to the mean of the first token that is not padding, so that a large mean does not cost
   digits. */
static double standard_deviation(const problem *p, const view *x, int64_t head, scratch c) {
    double total = 0;
    double total_square = 0;
    double tokens = 0;
    float origin = 0;
    for (int64_t start = 0; start < p->tokens; start += p->tile_size) {
        const span s = tile_at(p, head, start);
        const float *valid = valid_tokens(p, s, c.valid);
        float sum[D] = {0};
        float squares[D] = {0};
        for (int64_t i = 0; i < s.count; i++) {
            const float *y = first_token(x, s) + i * x->token;
            if (valid && !valid[i]) continue;
            if (tokens == 0)
                for (int d = 0; d < D; d++) origin += y[d] / D;
            tokens++;
#pragma omp simd
            for (int d = 0; d < D; d++) {
                sum[d] += y[d] - origin;
                squares[d] += (y[d] - origin) * (y[d] - origin);
            }
        }
        for (int d = 0; d < D; d++) {
            total += sum[d];
            total_square += squares[d];
        }
    }
    const double count = tokens > 0 ? tokens * D : 1;
    const double mean = total / count;
    const double variance = total_square / count - mean * mean;
    const double smallest = (double)MIN_SIGMA * MIN_SIGMA;
    return sqrt(variance < smallest ? smallest : variance);
}

/* Return the value at x of a table whose points are joined by straight lines. Beyond the first and the last point, the
   nearest line continues. */
static double interpolate(table t, double x) {
    int64_t right = 1;
    while (right < t.points - 1 && t.x[right] < x) right++;
    const double slope = ((double)t.y[right] - t.y[right - 1]) / ((double)t.x[right] - t.x[right - 1]);
    return t.y[right - 1] + slope * (x - t.x[right - 1]);
}

/* Store alpha = σ̃ / (√2 σ_q) and beta = σ̃ / (√2 σ_k) of a head. */
static void head_match_moments(const problem *p, int64_t head, scratch c) {
    const double sigma_q = standard_deviation(p, &p->q, head, c);
    const double sigma_k = standard_deviation(p, &p->k, head, c);
    const double matched = interpolate(p->calibration, 2 * log(sigma_q * sigma_k));
    const double sigma = exp((matched > LOG_SIGMA2_LIMIT ? LOG_SIGMA2_LIMIT : matched) / 2);
    p->alpha[head] = sigma / (sqrt(2) * sigma_q);
    p->beta[head] = sigma / (sqrt(2) * sigma_k);
}
