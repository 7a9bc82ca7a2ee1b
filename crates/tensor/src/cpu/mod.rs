//! The CPU backend. Start reading at [`CpuBackend`]; each kernel family has its file.
//!
//! Every kernel gives the same bits with any number of threads: see `parallel`. What depends on the instruction
//! set: see `simd`.

mod activation;
pub mod ahead;
#[cfg(target_arch = "x86_64")]
mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_amx;
mod attention_mask;
mod attention_paged;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod broadcast;
mod crew;
mod gemm;
mod grouped;
mod image;
mod layout;
mod loss;
mod math;
mod norm;
mod one_row;
mod packed;
mod parallel;
pub mod past_cache;
mod pointwise;
pub mod quantize;
mod reduce;
mod rows_alone;
mod screen;
pub mod simd;
mod widened;

use crate::backend::*;
use crate::dtype::{DType, Element};
use crate::error::{Result, TensorError};
use crate::memory::{Block, Category, HostPool, MemoryUsage};
use crate::out::Out;
use crate::pages::PagedSpec;
use crate::random::RandomKey;
use crate::tensor::Tensor;
use parallel::Threads;

/// Binds `$T` to the Rust type of a float dtype and gives `Ok($body)`, or the error for any other dtype.
macro_rules! float_kernel {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            $crate::dtype::DType::BF16 => {
                type $T = half::bf16;
                Ok($body)
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                Ok($body)
            }
            dtype => Err($crate::error::TensorError::BadDType {
                op: $op,
                what: "the operand",
                dtype,
                expected: "a float type",
            }),
        }
    };
}
pub(crate) use float_kernel;

/// Binds `$T` to a type of the dtype's size, for kernels that only move bytes.
macro_rules! any_kernel {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::dtype::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::dtype::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::dtype::DType::U8 | $crate::dtype::DType::Bool => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use any_kernel;

/// A kernel's input.
///
/// # Panics
/// When the op above let a wrong type through, which is a bug of ours.
pub(crate) fn read<T: Element>(tensor: &Tensor) -> &[T] {
    tensor.host::<T>().unwrap_or_else(|error| panic!("{error}"))
}

/// A kernel's output.
///
/// # Panics
/// When the op above let a wrong type through, which is a bug of ours.
pub(crate) fn write<T: Element>(out: Out<'_>) -> &mut [T] {
    out.into_host().unwrap_or_else(|error| panic!("{error}"))
}

/// Threads to use when nobody says: `FERROSPEED_THREADS` or `OMP_NUM_THREADS`, else the cores we may run on.
pub fn default_threads() -> usize {
    ["FERROSPEED_THREADS", "OMP_NUM_THREADS"]
        .iter()
        .filter_map(|name| std::env::var(name).ok()?.parse().ok())
        .find(|&count: &usize| count > 0)
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Kernels on this machine's processor.
pub struct CpuBackend {
    pool: HostPool,
    threads: Threads,
}

impl CpuBackend {
    /// A backend with its own memory pool and threads.
    pub fn new(threads: usize) -> CpuBackend {
        CpuBackend { pool: HostPool::new(), threads: Threads::new(threads) }
    }
}

impl Memory for CpuBackend {
    fn name(&self) -> String {
        format!("cpu with {} threads", self.threads.count())
    }
    fn is_host(&self) -> bool {
        true
    }
    fn allocate(&self, bytes: usize, category: Category) -> Result<RawBlock> {
        let block = self.pool.take(bytes, category)?;
        Ok(RawBlock { address: block.pointer, capacity_bytes: block.capacity_bytes })
    }
    fn free(&self, block: RawBlock, category: Category) {
        self.pool.free(Block { pointer: block.address, capacity_bytes: block.capacity_bytes }, category);
    }
    fn count_external(&self, bytes: usize, category: Category) {
        self.pool.count_external(bytes, category);
    }
    fn uncount_external(&self, bytes: usize, category: Category) {
        self.pool.uncount_external(bytes, category);
    }
    fn memory_usage(&self) -> MemoryUsage {
        self.pool.usage()
    }
    fn reset_peak_memory(&self) {
        self.pool.reset_peak();
    }
}

impl Work for CpuBackend {
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn parallel(&self, count: usize, task: &(dyn Fn(usize) + Send + Sync)) {
        self.threads.run(count, task);
    }
}

impl Copies for CpuBackend {
    fn copy_from_host(&self, source: &[u8], target: Out<'_>) -> Result<()> {
        if source.len() != target.size_bytes() {
            return Err(TensorError::argument(
                "copy_from_host",
                format!("{} bytes do not fill {target:?}", source.len()),
            ));
        }
        // SAFETY: the target holds exactly these bytes, and nobody else sees them, so neither does the caller's slice.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.address().as_ptr(), source.len()) };
        Ok(())
    }
    fn copy_to_host(&self, source: &Tensor, target: &mut [u8]) -> Result<()> {
        if target.len() != source.size_bytes() {
            return Err(TensorError::argument(
                "copy_to_host",
                format!("{source:?} does not fill {} bytes", target.len()),
            ));
        }
        // SAFETY: as above, the other way round.
        unsafe {
            std::ptr::copy_nonoverlapping(source.address().as_ptr(), target.as_mut_ptr(), target.len())
        };
        Ok(())
    }
    fn copy(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        if source.dtype() != target.dtype() || source.numel() != target.numel() {
            return Err(TensorError::ShapeMismatch {
                op: "copy",
                left: *source.shape(),
                right: *target.shape(),
            });
        }
        // SAFETY: both hold size_bytes; `copy` allows overlap.
        unsafe { std::ptr::copy(source.address().as_ptr(), target.address().as_ptr(), source.size_bytes()) };
        Ok(())
    }
    fn fill(&self, target: Out<'_>, value: f32) -> Result<()> {
        pointwise::fill(&self.threads, target, value);
        Ok(())
    }
    fn cast(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        pointwise::cast(&self.threads, source, target);
        Ok(())
    }
}

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
    fn takes_packed(&self, bits: crate::packed::PackedBits) -> bool {
        bits != crate::packed::PackedBits::Float8
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
        attention_paged::forward(&self.threads, spec, q, caches.map(|cache| cache.tensor), out)
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
        layout::permute(x, order, y);
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
            pointwise::gradient_in_place(&self.threads, activation, before.tensor, gradient.again())?;
        }
        sums.map_or(Ok(()), |sums| self.sum_rows(gradient.tensor, sums))
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
