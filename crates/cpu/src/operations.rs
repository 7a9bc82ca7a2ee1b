//! Which file has which operation of the backend: one list, by the traits of [`ferrospeed_tensor::backend`].

use super::*;

impl Products for CpuBackend {
    fn gemm(&self, gemm: Gemm<'_>) -> Result<()> {
        gemm::gemm(&self.threads, &self.pool, &gemm)
    }
    fn screen(&self, weight: &Tensor, examples: &Tensor) -> Result<Option<Box<dyn Screen>>> {
        Ok(Some(Box::new(screen::RowScreen::new(&self.threads, weight, examples)?)))
    }
    fn sum_rows(&self, x: &Tensor, target: Out<'_>) -> Result<()> {
        reduce::sum_rows(&self.threads, x, target)
    }
    fn takes_packed(&self, bits: ferrospeed_tensor::packed::PackedBits) -> bool {
        bits != ferrospeed_tensor::packed::PackedBits::Float8
    }
    fn gemm_packed(
        &self,
        x: &Tensor,
        layers: Vec<PackedLayer<'_>>,
        activation: Option<Activation>,
    ) -> Result<bool> {
        if layers.iter().any(|layer| !self.takes_packed(layer.weight.bits())) {
            return Ok(false);
        }
        layers.into_iter().try_for_each(|layer| packed::product(&self.threads, x, layer, activation))?;
        Ok(true)
    }
    fn grouped_gemm(&self, grouped: GroupedGemm<'_>) -> Result<()> {
        grouped::grouped_gemm(&self.threads, &self.pool, grouped)
    }
    fn grouped_outer(&self, grouped: GroupedOuter<'_>) -> Result<()> {
        grouped::grouped_outer(&self.threads, &self.pool, grouped)
    }
    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: Vec<Option<MatrixOut<'_>>>) -> Result<()> {
        grouped::grouped_sums(&self.threads, counts, x, targets)
    }
}

impl Attention for CpuBackend {
    fn attends_over_blocks(&self) -> bool {
        true
    }

    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: HeadsOut<'_>,
        logsumexp: Out<'_>,
    ) -> Result<()> {
        attention::forward(&self.threads, spec, [q, k, v], &out, logsumexp)
    }
    fn attention_backward(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
        dout: &Heads<'_>,
        gradients: [HeadsOut<'_>; 3],
    ) -> Result<()> {
        attention::backward(&self.threads, spec, [q, k, v, out, dout], logsumexp, gradients)
    }
    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [HeadsOut<'_>; 2],
        place: &Tensor,
        out: HeadsOut<'_>,
    ) -> Result<()> {
        attention::step(self, spec, new, caches, place, out)
    }
    fn reads_pages(&self, _dtype: DType, _dim: usize) -> bool {
        true
    }
    fn attention_paged(
        &self,
        spec: &PagedSpec<'_>,
        [q, k, v]: [&Tensor; 3],
        mut caches: [Out<'_>; 2],
        out: Out<'_>,
    ) -> Result<()> {
        spec.rows.append([k, v], caches.each_mut().map(Out::again))?;
        attention_paged::forward(&self.threads, spec, q, caches.map(Out::into_tensor), out)
    }
    fn rotary(
        &self,
        heads: HeadsOut<'_>,
        batch: usize,
        tokens: usize,
        head_count: usize,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> Result<()> {
        attention::rotary(&self.threads, &heads, batch, tokens, head_count, cos, sin, interleaved, inverse)
    }
}

impl Rows for CpuBackend {
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()> {
        layout::embedding(&self.threads, table, ids, out)
    }
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: Out<'_>) -> Result<()> {
        layout::embedding_backward(&self.threads, ids, dout, dtable)
    }
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()> {
        permute::permute(&self.threads, x, order, y);
        Ok(())
    }
    fn copy_blocks(
        &self,
        source: &Tensor,
        source_offset: usize,
        source_stride: usize,
        target: Out<'_>,
        target_offset: usize,
        target_stride: usize,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        layout::copy_blocks(
            source,
            source_offset,
            source_stride,
            target,
            target_offset,
            target_stride,
            rows,
            width,
        );
        Ok(())
    }
    fn index_select(
        &self,
        x: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        layout::index_select(x, indices, outer, size, inner, y)
    }
    fn index_add(
        &self,
        dy: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        dx: Out<'_>,
    ) -> Result<()> {
        layout::index_add(dy, indices, outer, size, inner, dx)
    }
    fn gather(&self, x: &Tensor, indices: &Tensor, y: Out<'_>) -> Result<()> {
        layout::gather(x, indices, y)
    }
    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: Out<'_>) -> Result<()> {
        layout::scatter_add(dy, indices, dx)
    }
    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()> {
        reduce::top_k(x, k, values, indices)
    }
    fn sort_groups(&self, ids: &Tensor, counts: Out<'_>, order: Out<'_>, place: Out<'_>) -> Result<()> {
        grouped::sort_groups(ids, counts, order, place)
    }
    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: Out<'_>) -> Result<()> {
        grouped::spread_rows(&self.threads, x, rows, y)
    }
    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: Out<'_>,
    ) -> Result<()> {
        grouped::collect_rows(&self.threads, x, rows, weights, y)
    }
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()> {
        grouped::collect_rows_backward(&self.threads, inputs, rows, dx, dweights)
    }
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()> {
        image::image_to_columns(x, window, columns)
    }
    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()> {
        image::columns_to_image(columns, window, x)
    }
    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()> {
        image::max_pool2d(x, window, y, indices)
    }
}

impl Pointwise for CpuBackend {
    fn activation_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: Out<'_>,
    ) -> Result<()> {
        pointwise::unary_backward(&self.threads, Unary::Activation(activation), x, dy, dx)
    }
    fn activation_backward_in_place(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
    ) -> Result<()> {
        pointwise::activation_backward_in_place(&self.threads, activation, before, gradient)
    }
    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: Out<'_>,
        mut gradient: Out<'_>,
        rebuilds: bool,
        sums: Option<Out<'_>>,
    ) -> Result<()> {
        // Sums are taken in parts, by the number of rows alone: where those are fewer than threads, one after the other.
        let parts = reduce::partial_blocks(before.shape().rows()).0;
        let sums = match sums {
            Some(sums) if rebuilds && parts >= self.threads.count() => {
                return pointwise::activation_backward_sums(
                    &self.threads,
                    activation,
                    before,
                    gradient,
                    sums,
                );
            }
            sums => sums,
        };
        if rebuilds {
            self.activation_backward_in_place(activation, before, gradient.again())?;
        } else {
            pointwise::gradient_in_place(&self.threads, activation, before.into_tensor(), gradient.again())?;
        }
        sums.map_or(Ok(()), |sums| self.sum_rows(gradient.into_tensor(), sums))
    }
    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: Out<'_>) -> Result<()> {
        pointwise::gated(&self.threads, activation, gate, up, y)
    }
    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: Out<'_>,
        up: Out<'_>,
        dy: Out<'_>,
        rebuilds: bool,
    ) -> Result<()> {
        pointwise::gated_backward_in_place(&self.threads, activation, gate, up, dy, rebuilds)
    }
    fn weighted_gated_backward(
        &self,
        activation: Activation,
        rows: &RoutedRows<'_>,
        weights: &Tensor,
        values: [Out<'_>; 3],
        dweights: Out<'_>,
    ) -> Result<()> {
        grouped::weighted_gated_backward(&self.threads, activation, rows, weights, values, dweights)
    }
    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<()> {
        pointwise::gated_backward(&self.threads, activation, gate, up, dy, dgate, dup)
    }
    fn scale_in_place(&self, target: Out<'_>, factor: &Tensor) -> Result<()> {
        pointwise::scale_in_place(&self.threads, target, read::<f32>(factor)[0])
    }
    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: Out<'_>) -> Result<()> {
        pointwise::scale_by(&self.threads, source, read::<f32>(factor)[0], target)
    }
    fn dropout(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey) -> Result<()> {
        pointwise::dropout(&self.threads, x, y, p, key)
    }
    fn dropout_rows(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey, starts: &[u64]) -> Result<()> {
        pointwise::dropout_rows(&self.threads, x, y, p, key, starts)
    }
    fn unary(&self, op: Unary, x: &Tensor, y: Out<'_>) -> Result<()> {
        pointwise::unary(&self.threads, op, x, y)
    }
    fn unary_in_place(&self, op: Unary, x: Out<'_>) -> Result<()> {
        pointwise::unary_in_place(&self.threads, op, x)
    }
    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: Out<'_>) -> Result<()> {
        pointwise::unary_backward(&self.threads, op, x, dy, dx)
    }
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        broadcast::binary(&self.threads, op, a, b, y)
    }
    fn add_assign(&self, target: Out<'_>, source: &Tensor) -> Result<()> {
        pointwise::add_assign(&self.threads, target, source)
    }
    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        broadcast::compare(&self.threads, op, a, b, y)
    }
    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        broadcast::select(condition, a, b, y)
    }
}

impl Sums for CpuBackend {
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, Out<'_>)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: Out<'_>,
        mean: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<()> {
        norm::norm(&self.threads, kind, eps, x, residual, weight, bias, y, mean, rstd)
    }
    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: Out<'_>,
        dweight: Option<Out<'_>>,
        dbias: Option<Out<'_>>,
    ) -> Result<()> {
        norm::norm_backward(&self.threads, kind, x, weight, mean, rstd, dy, dsum, dx, dweight, dbias)
    }
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        loss::cross_entropy_rows(&self.threads, options, logits, targets, losses, gradient)
    }
    fn cross_entropy_part(
        &self,
        part: &ClassPart,
        logits: Out<'_>,
        targets: &Tensor,
        told: Out<'_>,
    ) -> Result<()> {
        loss_parts::cross_entropy_part(&self.threads, part, logits, targets, told)
    }
    fn cross_entropy_of_parts(
        &self,
        part: &ClassPart,
        told: &Tensor,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        loss_parts::cross_entropy_of_parts(&self.threads, part, told, logits, targets, losses, gradient)
    }
    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: Out<'_>) -> Result<()> {
        let counted = read::<i64>(targets).iter().filter(|&&target| target != ignore_index).count();
        write::<i64>(target)[0] = counted as i64;
        Ok(())
    }
    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: Out<'_>) -> Result<()> {
        let total: f64 = read::<f32>(losses).iter().copied().map(f64::from).sum();
        write::<f32>(target)[0] = (total / read::<i64>(counted)[0].max(1) as f64) as f32;
        Ok(())
    }
    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        reduce::reduce(&self.threads, op, x, outer, size, inner, y)
    }
    fn sum_to(&self, x: &Tensor, y: Out<'_>) -> Result<()> {
        broadcast::sum_to(x, y)
    }
    fn softmax(&self, x: &Tensor, y: Out<'_>, log: bool) -> Result<()> {
        reduce::softmax(&self.threads, x, y, log)
    }
    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: Out<'_>, log: bool) -> Result<()> {
        reduce::softmax_backward(&self.threads, y, dy, dx, log)
    }
    fn cumsum(&self, x: &Tensor, y: Out<'_>, reverse: bool) -> Result<()> {
        reduce::cumsum(x, y, reverse)
    }
}

impl Updates for CpuBackend {}

impl Integers for CpuBackend {}

impl OneBit for CpuBackend {}
