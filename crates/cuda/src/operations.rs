//! Which file has which operation of the backend: one list, by the traits of [`ferrospeed_tensor::backend`].

use super::*;

impl Products for CudaBackend {
    fn gemm(&self, gemm: Gemm<'_>) -> Result<()> {
        gemm::gemm(self, &gemm)
    }
    fn split_columns(&self, x: &Tensor, parts: Vec<Out<'_>>) -> Result<()> {
        let parts: Vec<&Tensor> = parts.into_iter().map(Out::into_tensor).collect();
        layout::split_columns(self, x, &parts)
    }
    fn joined_rows(&self) -> Option<[usize; 2]> {
        // Our own kernels take up to so many rows with weights side by side.
        let own = few_rows::most_rows(self, DType::BF16, false).max(gemm::FEW_ROWS);
        Some([own, gemm::JOINED_ROWS])
    }
    fn most_few_rows(&self, dtype: DType, normed: bool, bits: Option<PackedBits>) -> usize {
        match bits {
            None => few_rows::most_rows(self, dtype, normed),
            Some(bits) => packed::most_rows(self, dtype, bits),
        }
    }
    fn few_rows(&self, step: FewRows<'_>) -> Result<bool> {
        Ok(few_rows::few_rows(self, &step)? || packed::few_rows(self, &step)?)
    }
    fn takes_packed(&self, bits: PackedBits) -> bool {
        packed::takes(self, bits)
    }
    fn gemm_packed(
        &self,
        x: &Tensor,
        layers: Vec<PackedLayer<'_>>,
        activation: Option<Activation>,
    ) -> Result<bool> {
        packed::products(self, x, layers, activation)
    }
    fn gemms(&self, products: Vec<Gemm<'_>>) -> Result<()> {
        gemm::gemms(self, &products)
    }
    fn sum_rows(&self, x: &Tensor, target: Out<'_>) -> Result<()> {
        reduce::sum_rows(self, x, target.into_tensor())
    }
    fn grouped_gemm(&self, grouped: GroupedGemm<'_>) -> Result<()> {
        grouped::grouped_gemm(self, &grouped)
    }
    fn grouped_outer(&self, grouped: GroupedOuter<'_>) -> Result<()> {
        grouped::grouped_outer(self, &grouped)
    }
    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: Vec<Option<MatrixOut<'_>>>) -> Result<()> {
        grouped::grouped_sums(self, counts, x, &targets)
    }
}

impl Attention for CudaBackend {
    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: HeadsOut<'_>,
        logsumexp: Out<'_>,
    ) -> Result<()> {
        attention::forward(self, spec, q, k, v, &out.into_heads(), logsumexp.into_tensor())
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
        let gradients = gradients.map(HeadsOut::into_heads);
        attention::backward(self, spec, [q, k, v, out, dout], logsumexp, gradients.each_ref())
    }
    fn prefers_whole_sequences(&self, dtype: DType, dim: usize) -> bool {
        cudnn_attention::knows(self, dtype, dim)
    }
    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [HeadsOut<'_>; 2],
        place: &Tensor,
        out: HeadsOut<'_>,
    ) -> Result<()> {
        let caches = caches.map(HeadsOut::into_heads);
        attention::step(self, spec, new, caches.each_ref(), place, &out.into_heads())
    }
    fn reads_pages(&self, dtype: DType, dim: usize) -> bool {
        attention_pages::knows(dtype, dim)
    }
    fn turns_pages(&self) -> bool {
        true
    }
    fn attention_paged(
        &self,
        spec: &PagedSpec<'_>,
        new: [&Tensor; 3],
        caches: [Out<'_>; 2],
        out: Out<'_>,
    ) -> Result<()> {
        attention_pages::forward(self, spec, new, caches.map(Out::into_tensor), out.into_tensor())
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
        attention::rotary(
            self,
            &heads.into_heads(),
            batch,
            tokens,
            head_count,
            cos,
            sin,
            interleaved,
            inverse,
        )
    }
}

impl Rows for CudaBackend {
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()> {
        layout::embedding(self, table, ids, out.into_tensor())
    }
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: Out<'_>) -> Result<()> {
        layout::embedding_backward(self, ids, dout, dtable.into_tensor())
    }
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()> {
        permute::permute(self, x, order, y.into_tensor())
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
        let (from, to) =
            ((source, source_offset, source_stride), (target.into_tensor(), target_offset, target_stride));
        layout::copy_blocks(self, from, to, rows, width)
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
        layout::index_select(self, x, indices, outer, size, inner, y.into_tensor())
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
        layout::index_add(self, dy, indices, outer, size, inner, dx.into_tensor())
    }
    fn gather(&self, x: &Tensor, indices: &Tensor, y: Out<'_>) -> Result<()> {
        layout::gather(self, x, indices, y.into_tensor())
    }
    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: Out<'_>) -> Result<()> {
        layout::scatter_add(self, dy, indices, dx.into_tensor())
    }
    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()> {
        reduce::top_k(self, x, k, values.into_tensor(), indices.into_tensor())
    }
    fn sort_groups(&self, ids: &Tensor, counts: Out<'_>, order: Out<'_>, place: Out<'_>) -> Result<()> {
        grouped::sort_groups(self, ids, counts.into_tensor(), order.into_tensor(), place.into_tensor())
    }
    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: Out<'_>) -> Result<()> {
        grouped::spread_rows(self, x, rows, y.into_tensor())
    }
    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: Out<'_>,
    ) -> Result<()> {
        grouped::collect_rows(self, x, rows, weights, y.into_tensor())
    }
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()> {
        grouped::collect_rows_backward(self, inputs, rows, dx.into_tensor(), dweights.into_tensor())
    }
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()> {
        image::image_to_columns(self, x, window, columns.into_tensor())
    }
    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()> {
        image::columns_to_image(self, columns, window, x.into_tensor())
    }
    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()> {
        image::max_pool2d(self, x, window, y.into_tensor(), indices.into_tensor())
    }
}

impl Pointwise for CudaBackend {
    fn activation_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: Out<'_>,
    ) -> Result<()> {
        self.unary_backward(Unary::Activation(activation), x, dy, dx)
    }
    fn activation_backward_in_place(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
    ) -> Result<()> {
        elementwise::activation_backward_in_place(
            self,
            activation,
            before.into_tensor(),
            gradient.into_tensor(),
        )
    }
    fn kept_activation_width(&self) -> usize {
        KEPT_ACTIVATION_WIDTH
    }
    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
        rebuilds: bool,
        sums: Option<Out<'_>>,
    ) -> Result<()> {
        elementwise::activation_backward_sums(
            self,
            activation,
            before.into_tensor(),
            gradient.into_tensor(),
            rebuilds,
            sums.map(Out::into_tensor),
        )
    }
    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: Out<'_>) -> Result<()> {
        elementwise::gated(self, activation, gate, up, y.into_tensor())
    }
    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: Out<'_>,
        up: Out<'_>,
        dy: Out<'_>,
        rebuilds: bool,
    ) -> Result<()> {
        elementwise::gated_backward_in_place(
            self,
            activation,
            gate.into_tensor(),
            up.into_tensor(),
            dy.into_tensor(),
            rebuilds,
        )
    }
    fn weighted_gated_backward(
        &self,
        activation: Activation,
        rows: &RoutedRows<'_>,
        weights: &Tensor,
        [gate, up, dy]: [Out<'_>; 3],
        dweights: Out<'_>,
    ) -> Result<()> {
        let values = [gate.into_tensor(), up.into_tensor(), dy.into_tensor()];
        elementwise::weighted_gated_backward(self, activation, rows, weights, values, dweights.into_tensor())
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
        elementwise::gated_backward(self, activation, gate, up, dy, dgate.into_tensor(), dup.into_tensor())
    }
    fn scale_in_place(&self, target: Out<'_>, factor: &Tensor) -> Result<()> {
        let target = target.into_tensor();
        layout::scale_by(self, target, factor, target)
    }
    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: Out<'_>) -> Result<()> {
        layout::scale_by(self, source, factor, target.into_tensor())
    }
    fn dropout(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey) -> Result<()> {
        elementwise::dropout(self, x, y.into_tensor(), p, key)
    }
    fn dropout_rows(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey, starts: &[u64]) -> Result<()> {
        elementwise::dropout_rows(self, x, y.into_tensor(), p, key, starts)
    }
    fn unary(&self, op: Unary, x: &Tensor, y: Out<'_>) -> Result<()> {
        self.unary_into(op, x, y.into_tensor())
    }
    fn unary_in_place(&self, op: Unary, x: Out<'_>) -> Result<()> {
        let x = x.into_tensor();
        self.unary_into(op, x, x)
    }
    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: Out<'_>) -> Result<()> {
        elementwise::unary_backward(self, op, x, dy, dx.into_tensor())
    }
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        elementwise::binary(self, op, a, b, y.into_tensor())
    }
    fn add_assign(&self, target: Out<'_>, source: &Tensor) -> Result<()> {
        elementwise::add_assign(self, target.into_tensor(), source)
    }
    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        layout::compare(self, op, a, b, y.into_tensor())
    }
    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        elementwise::select(self, condition, a, b, y.into_tensor())
    }
}

impl Sums for CudaBackend {
    fn logits_dtype(&self, dtype: DType) -> DType {
        dtype
    }
    fn logits_rows(&self, row_bytes: usize) -> usize {
        (768 << 20) / row_bytes.max(1)
    }
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
        let residual = residual.map(|(residual, sum)| (residual, sum.into_tensor()));
        norm::norm(
            self,
            kind,
            eps,
            x,
            residual,
            weight,
            bias,
            y.into_tensor(),
            mean.into_tensor(),
            rstd.into_tensor(),
        )
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
        norm::norm_backward(
            self,
            kind,
            x,
            weight,
            mean,
            rstd,
            dy,
            dsum,
            dx.into_tensor(),
            dweight.map(Out::into_tensor),
            dbias.map(Out::into_tensor),
        )
    }
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let (logits, with_gradient) = (logits.into_tensor(), !matches!(gradient, LossGradient::Nowhere));
        loss::cross_entropy_rows(self, options, logits, targets, losses.into_tensor(), with_gradient)?;
        match gradient {
            LossGradient::Into(target) => self.cast(logits, target),
            LossGradient::Nowhere | LossGradient::OverLogits => Ok(()),
        }
    }
    fn cross_entropy_part(
        &self,
        part: &ClassPart,
        logits: Out<'_>,
        targets: &Tensor,
        told: Out<'_>,
    ) -> Result<()> {
        loss::cross_entropy_part(self, part, logits.into_tensor(), targets, told.into_tensor())
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
        let (logits, with_gradient) = (logits.into_tensor(), !matches!(gradient, LossGradient::Nowhere));
        loss::cross_entropy_of_parts(self, part, told, logits, targets, losses.into_tensor(), with_gradient)?;
        match gradient {
            LossGradient::Into(target) => self.cast(logits, target),
            LossGradient::Nowhere | LossGradient::OverLogits => Ok(()),
        }
    }
    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: Out<'_>) -> Result<()> {
        loss::count_targets(self, targets, ignore_index, target.into_tensor())
    }
    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: Out<'_>) -> Result<()> {
        loss::mean_loss(self, losses, counted, target.into_tensor())
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
        reduce::reduce(self, op, x, outer, size, inner, y.into_tensor())
    }
    fn sum_to(&self, x: &Tensor, y: Out<'_>) -> Result<()> {
        elementwise::sum_to(self, x, y.into_tensor())
    }
    fn softmax(&self, x: &Tensor, y: Out<'_>, log: bool) -> Result<()> {
        reduce::softmax(self, x, y.into_tensor(), log)
    }
    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: Out<'_>, log: bool) -> Result<()> {
        reduce::softmax_backward(self, y, dy, dx.into_tensor(), log)
    }
    fn cumsum(&self, x: &Tensor, y: Out<'_>, reverse: bool) -> Result<()> {
        reduce::cumsum(self, x, y.into_tensor(), reverse)
    }
}

impl Updates for CudaBackend {
    fn update(&self, update: &Update, gradient_factor: f32, pieces: &[UpdateOperands]) -> Result<()> {
        optimizer::update(self, update, gradient_factor, pieces)
    }
    fn largest_magnitude(&self, pieces: &[&Tensor]) -> Result<f32> {
        optimizer::largest_magnitude(self, pieces)
    }
    fn sum_of_squares(&self, pieces: &[&Tensor], grid: f64) -> Result<i128> {
        optimizer::sum_of_squares(self, pieces, grid)
    }
    fn measure_more(&self, pieces: &[&Tensor], grids: &[f64], measures: Out<'_>) -> Result<()> {
        optimizer::measure_more(self, pieces, grids, measures.into_tensor())
    }
    fn clipped_updates(
        &self,
        clipping: Clipping,
        gradients: &[&Tensor],
        updates: &[(Update, Vec<UpdateOperands>)],
    ) -> Result<Option<Measured>> {
        optimizer::clipped_updates(self, clipping, gradients, updates).map(Some)
    }
}
