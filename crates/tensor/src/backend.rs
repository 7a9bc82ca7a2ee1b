//! What a device must be able to do.
//!
//! [`Backend`] is object-safe: the ops above it know one `Device` and never a kernel. A call only *submits*
//! work; results may be read after [`Backend::synchronize`], or through the copies to the host, which wait.
//! Outputs are allocated by the caller and fully overwritten, unless a method says that it accumulates.

mod grouped;

pub use grouped::{GroupedGemm, GroupedOuter, RoutedRows};

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::cpu::CpuBackend;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::memory::{Category, MemoryUsage};
use crate::packed::PackedWeight;
use crate::pages::PagedSpec;
use crate::random::{RandomKey, drop_threshold};
use crate::tensor::Tensor;

/// Raw device memory.
#[derive(Debug, Clone, Copy)]
pub struct RawBlock {
    /// Its address on the device.
    pub address: NonNull<u8>,
    /// How many bytes there are.
    pub capacity_bytes: usize,
}

// SAFETY: a block is an owned range of memory; access is governed by the buffer that holds it.
unsafe impl Send for RawBlock {}
// SAFETY: as above.
unsafe impl Sync for RawBlock {}

/// A matrix operand of a product: `tensor` read from `offset` on, row-major with `row_stride`, or transposed.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Where the elements are.
    pub tensor: &'a Tensor,
    /// The first element.
    pub offset: usize,
    /// Elements between rows as stored.
    pub row_stride: usize,
    /// Elements between matrices of a batch.
    pub batch_stride: usize,
    /// Whether the product uses the transpose of what is stored.
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A whole tensor as one matrix of its last dimension's width.
    pub fn whole(tensor: &'a Tensor) -> Self {
        Matrix { tensor, offset: 0, row_stride: tensor.shape().last(), batch_stride: 0, transposed: false }
    }

    /// The same, transposed.
    pub fn transposed(tensor: &'a Tensor) -> Self {
        Matrix { transposed: true, ..Matrix::whole(tensor) }
    }
}

/// The pointwise functions that are fused into products and gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x·Φ(x)` by the error function.
    GeluErf,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// `x·sigmoid(1.702·x)`.
    QuickGelu,
    /// `x·sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
    /// Logistic function.
    Sigmoid,
}

impl Activation {
    /// Every one, in order.
    pub const ALL: [Activation; 7] = [
        Activation::GeluErf,
        Activation::GeluTanh,
        Activation::QuickGelu,
        Activation::Silu,
        Activation::Relu,
        Activation::Tanh,
        Activation::Sigmoid,
    ];
}

/// `c = [c +] a·b`, then `+ bias` along rows, then an activation, then `+ residual`.
#[derive(Debug, Clone, Copy)]
pub struct Gemm<'a> {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// The summed dimension.
    pub k: usize,
    /// How many products.
    pub batch: usize,
    /// The left operand, m×k.
    pub a: Matrix<'a>,
    /// The right operand, k×n.
    pub b: Matrix<'a>,
    /// The result, m×n; never transposed. Its type may be the operands' or f32.
    pub c: Matrix<'a>,
    /// Multiplies the product.
    pub alpha: f32,
    /// Whether the product is added to what `c` holds.
    pub accumulate: bool,
    /// Added to each row.
    pub bias: Option<&'a Tensor>,
    /// Applied after the bias; the value before it goes to `before_activation`.
    pub activation: Option<Activation>,
    /// Where the value before the activation is kept for backward.
    pub before_activation: Option<&'a Tensor>,
}

impl<'a> Gemm<'a> {
    /// `c = a·b`, one product with nothing fused; `c` is contiguous.
    pub fn plain(m: usize, n: usize, k: usize, a: Matrix<'a>, b: Matrix<'a>, c: &'a Tensor) -> Self {
        Gemm {
            m,
            n,
            k,
            batch: 1,
            a,
            b,
            c: Matrix { row_stride: n, ..Matrix::whole(c) },
            alpha: 1.0,
            accumulate: false,
            bias: None,
            activation: None,
            before_activation: None,
        }
    }
}

/// Finds the largest products of a vector with the rows of a matrix, without reading all of them; see [`Backend::screen`].
pub trait Screen: Send {
    /// The rows of `weight`, the matrix that this was made of, whose products with `x` can be among the `count` largest:
    /// in order, each with its product, to the bits that the whole product by [`Backend::gemm`] has in their type. All
    /// other products are less than at least `count` of these, and none is NaN.
    ///
    /// `None` where that cannot be told, or not of few rows: then the whole product has to be made.
    fn largest(&mut self, weight: &Tensor, x: &Tensor, count: usize) -> Result<Option<Vec<(usize, f32)>>>;
}

/// A tensor of attention heads inside a larger one, e.g. the keys inside a packed qkv projection.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// Where the elements are.
    pub tensor: &'a Tensor,
    /// The first element of head 0, token 0, batch 0.
    pub offset: usize,
    /// Elements between sequences of the batch.
    pub batch_stride: usize,
    /// Elements between tokens.
    pub token_stride: usize,
    /// Elements between heads.
    pub head_stride: usize,
}

/// One attention call. Shapes: q `[batch, queries, heads, dim]`, k and v `[batch, keys, kv_heads, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a> {
    /// Sequences.
    pub batch: usize,
    /// Query tokens per sequence.
    pub queries: usize,
    /// Key tokens per sequence.
    pub keys: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels per head.
    pub dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Where the first query stands among the keys; `None`: the queries are the last tokens of the keys.
    pub first_query: Option<isize>,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// With a window `w`, query at position `p` sees keys `> p - w`.
    pub window: Option<usize>,
    /// `[batch, keys]`, nonzero where a key may be seen.
    pub key_mask: Option<&'a Tensor>,
    /// ALiBi: `[heads]` slopes; `slope · key position` is added to the scores.
    pub alibi_slopes: Option<&'a Tensor>,
    /// `[batch, keys]` key positions for ALiBi, when they are not `0..keys`.
    pub alibi_positions: Option<&'a Tensor>,
    /// Probability of dropping an attention weight, with the key of its random numbers.
    pub dropout: Option<(f32, RandomKey)>,
    /// Where these weights are among those that were drawn for together; `None`: they are all of them.
    pub weights: Option<WeightGrid>,
}

/// Some of the weights `[batch, heads, queries, keys]` of an attention of which other ranks compute the rest: whether one is
/// dropped depends on where it is in the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightGrid {
    /// Heads, queries and keys of the whole.
    pub whole: [usize; 3],
    /// The first head, query and key that is computed.
    pub first: [usize; 3],
}

impl AttentionSpec<'_> {
    /// The position of the first query among the keys.
    pub fn shift(&self) -> isize {
        self.first_query.unwrap_or(self.keys as isize - self.queries as isize)
    }

    /// Where these weights are among those that were drawn for together.
    pub fn weight_grid(&self) -> WeightGrid {
        let whole = [self.heads, self.queries, self.keys];
        self.weights.unwrap_or(WeightGrid { whole, first: [0; 3] })
    }
}

/// Which normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with weight.
    Rms,
}

/// Elementwise functions of one operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unary {
    /// One of the fused activations.
    Activation(Activation),
    /// `-x`
    Neg,
    /// `exp(x)`
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// `x²`
    Square,
    /// `|x|`
    Abs,
    /// `1/x`
    Reciprocal,
    /// `scale·x + shift`
    Affine {
        /// The factor.
        scale: f32,
        /// The summand.
        shift: f32,
    },
    /// `xⁿ`
    Power(f32),
}

/// Elementwise functions of two operands, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// `max(a, b)`
    Max,
    /// `min(a, b)`
    Min,
}

/// Comparisons, with broadcasting; the result is `Bool`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// `a = b`
    Equal,
    /// `a < b`
    Less,
    /// `a ≤ b`
    LessEqual,
}

/// Reductions over a contiguous middle dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, accumulated in f32 in a fixed order.
    Sum,
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
}

/// How a cross-entropy is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// Targets with this value count for nothing.
    pub ignore_index: i64,
    /// Share of the probability spread over all classes.
    pub label_smoothing: f32,
    /// Weight of the squared log-partition term.
    pub z_loss: f32,
}

/// Where the gradient of each row's own loss goes: not of their mean, which small types could not hold.
#[derive(Debug, Clone, Copy)]
pub enum LossGradient<'a> {
    /// It is not wanted.
    Nowhere,
    /// It takes the place of the logits.
    OverLogits,
    /// Into a tensor of their shape, rounded to its type.
    Into(&'a Tensor),
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, z_loss: 0.0 }
    }
}

/// A two-dimensional convolution or pooling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window2d {
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
}

/// A point in a device's work: see [`Backend::mark`].
#[derive(Debug, PartialEq, Eq)]
pub struct Mark(pub(crate) u64);

/// A device: memory and kernels.
pub trait Backend: Send + Sync {
    /// What it calls itself in messages.
    fn name(&self) -> String;
    /// Whether its memory is the host's.
    fn is_host(&self) -> bool;
    /// Takes memory; content undefined.
    fn allocate(&self, bytes: usize, category: Category) -> Result<RawBlock>;
    /// Gives memory back.
    fn free(&self, block: RawBlock, category: Category);
    /// Counts memory that somebody else allocated.
    fn count_external(&self, bytes: usize, category: Category);
    /// Ends that.
    fn uncount_external(&self, bytes: usize, category: Category);
    /// What is held.
    fn memory_usage(&self) -> MemoryUsage;
    /// Starts the peaks anew from what is held now.
    fn reset_peak_memory(&self);
    /// Waits until everything submitted so far is done.
    fn synchronize(&self) -> Result<()>;
    /// Marks where its work now is, to be asked later how long lay between two such points; `None` where the host's clock does
    /// as well. Must be given back to [`Backend::unmark`].
    fn mark(&self) -> Result<Option<Mark>> {
        Ok(None)
    }
    /// Seconds that passed on the device between two marks. Waits for the later one.
    fn seconds_between(&self, _earlier: &Mark, _later: &Mark) -> Result<f64> {
        Ok(0.0)
    }
    /// Ends a mark.
    fn unmark(&self, _mark: Mark) {}
    /// Waits until its work has come to a mark.
    fn wait_for(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    /// Lets what is submitted later wait for a mark, without keeping the host.
    fn follow(&self, _mark: &Mark) -> Result<()> {
        Ok(())
    }
    /// Of a GPU: its number, and the handle of the stream that its work goes to.
    fn stream(&self) -> Option<(usize, u64)> {
        None
    }
    /// Runs `task(0)` to `task(count - 1)` on the host's threads that serve this device, and waits.
    fn parallel(&self, count: usize, task: &(dyn Fn(usize) + Send + Sync)) {
        (0..count).for_each(task);
    }
    /// Keeps what `work` submits under a number, without running it; see [`Device::record`].
    fn record(&self, _work: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
        Ok(None)
    }
    /// Submits recorded work.
    fn replay(&self, _recorded: u64) -> Result<()> {
        Err(self.left_to_the_host("replay"))
    }
    /// Gives up what a recording holds.
    fn forget(&self, _recorded: u64) {}
    /// Copies bytes in; `source` may be reused at once.
    fn copy_from_host(&self, source: &[u8], target: &Tensor) -> Result<()>;
    /// Copies bytes out, after everything submitted before.
    fn copy_to_host(&self, source: &Tensor, target: &mut [u8]) -> Result<()>;
    /// Begins to copy a small tensor out. What is returned waits for what was submitted before this call, no more.
    fn read_later<'a>(&'a self, source: &Tensor) -> Result<ReadLater<'a>> {
        let mut bytes = vec![0; source.size_bytes()];
        self.copy_to_host(source, &mut bytes)?;
        Ok(Box::new(move || Ok(bytes)))
    }
    /// Memory of the host that the device can copy to and from beside its other work: see [`crate::beside`].
    fn locked(&self, numel: usize, dtype: DType, category: Category) -> Result<Tensor> {
        Tensor::empty_in([numel], dtype, &Device::cpu(), category)
    }
    /// Begins a copy between a tensor of this device and one of [`Backend::locked`], behind what was submitted before a mark;
    /// gives a mark behind the copy. See [`crate::beside::Beside`].
    fn copy_beside(&self, _source: &Tensor, _target: &Tensor, _after: &Mark) -> Result<Mark> {
        Err(self.left_to_the_host("copy_beside"))
    }
    /// Copies between tensors of this device, same type and size.
    fn copy(&self, source: &Tensor, target: &Tensor) -> Result<()>;
    /// Sets every element.
    fn fill(&self, target: &Tensor, value: f32) -> Result<()>;
    /// Converts between types.
    fn cast(&self, source: &Tensor, target: &Tensor) -> Result<()>;

    /// Matrix product with fused epilogue.
    fn gemm(&self, gemm: &Gemm<'_>) -> Result<()>;
    /// `y = f(x·Wᵀ + b)` with a weight of few bits. `false`: the device has no kernel for it, and nothing was done.
    fn gemm_packed(
        &self,
        _x: &Tensor,
        _weight: &PackedWeight,
        _bias: Option<&Tensor>,
        _activation: Option<Activation>,
        _y: &Tensor,
    ) -> Result<bool> {
        Ok(false)
    }
    /// A small copy of `weight`, `[rows, width]`, for finding its largest products with one vector at a time; the rows of
    /// `examples` are vectors such as will come. `None` where the device knows no better way than the whole product.
    fn screen(&self, _weight: &Tensor, _examples: &Tensor) -> Result<Option<Box<dyn Screen>>> {
        Ok(None)
    }
    /// Sums a `[rows, columns]` matrix over its rows.
    fn sum_rows(&self, x: &Tensor, target: &Tensor) -> Result<()>;
    /// `dx = dy · f'(x)`, `x` the value before the activation.
    fn activation_backward(&self, activation: Activation, x: &Tensor, dy: &Tensor, dx: &Tensor)
    -> Result<()>;
    /// The same where both may be overwritten: `before` becomes `f(before)`, `gradient` is multiplied by `f'(before)`.
    fn activation_backward_in_place(
        &self,
        activation: Activation,
        before: &Tensor,
        gradient: &Tensor,
    ) -> Result<()>;
    /// Widest rows of which a perceptron keeps the values after its activation beside those before it, so that backward
    /// need not make them again: memory for time.
    fn kept_activation_width(&self) -> usize {
        0
    }
    /// `gradient` is multiplied by `f'(before)` where it lies, and the sums of its columns go to `sums`. With `rebuilds`,
    /// `before` becomes `f(before)`.
    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: &Tensor,
        gradient: &Tensor,
        rebuilds: bool,
        sums: Option<&Tensor>,
    ) -> Result<()> {
        if rebuilds {
            self.activation_backward_in_place(activation, before, gradient)?;
        } else {
            self.activation_backward(activation, before, gradient, gradient)?;
        }
        sums.map_or(Ok(()), |sums| self.sum_rows(gradient, sums))
    }
    /// `y = f(gate) · up`.
    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: &Tensor) -> Result<()>;
    /// Gradients of [`Backend::gated`] where its operands lie: `gate` and `up` become theirs. With `rebuilds`, the gradient
    /// `dy` of the result becomes the result.
    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        rebuilds: bool,
    ) -> Result<()>;
    /// Gradients of [`Backend::gated`].
    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        dgate: &Tensor,
        dup: &Tensor,
    ) -> Result<()>;
    /// Normalises rows of `x`, or of `x + residual` (then kept in `sum`); statistics go to `mean` and `rstd` (f32).
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, &Tensor)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
    ) -> Result<()>;
    /// Gradients of [`Backend::norm`]; `dsum` is what reaches the sum by other ways and is added to `dx`.
    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: &Tensor,
        dweight: Option<&Tensor>,
        dbias: Option<&Tensor>,
    ) -> Result<()>;
    /// Attention without the score matrix; `logsumexp` is `[batch, heads, queries]` in f32.
    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
    ) -> Result<()>;
    /// Gradients of [`Backend::attention`].
    fn attention_backward(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
        dout: &Heads<'_>,
        dq: &Heads<'_>,
        dk: &Heads<'_>,
        dv: &Heads<'_>,
    ) -> Result<()>;
    /// Attention of one new token per sequence (`queries` is 1) over all that the caches hold, itself included.
    ///
    /// `new` are its query, key and value; the latter two are appended to `caches` behind the first `place` tokens, an
    /// `I64` in the device's memory. The spec's `keys` is the capacity of the caches; it has no mask.
    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [&Heads<'_>; 2],
        place: &Tensor,
        out: &Heads<'_>,
    ) -> Result<()>;
    /// Takes rows of `x` apart into up to three: `parts[i]` gets as many columns as it is wide, from left to right. For devices
    /// with [`Backend::joined_rows`].
    fn split_columns(&self, _x: &Tensor, _parts: &[&Tensor]) -> Result<()> {
        Err(TensorError::argument("split_columns", "this device has no kernel for it"))
    }
    /// How many rows on the left are worth computing products with neighbouring weights as one, and taking its result apart; more
    /// than the first, at most the second. `None`: it never is.
    fn joined_rows(&self) -> Option<[usize; 2]> {
        None
    }
    /// Several products; a device may compute those with the same few rows on the left at once.
    fn gemms(&self, products: &[Gemm<'_>]) -> Result<()> {
        products.iter().try_for_each(|product| self.gemm(product))
    }
    /// Whether [`Backend::attention_paged`] knows heads of this type and width.
    fn reads_pages(&self, _dtype: DType, _dim: usize) -> bool {
        false
    }
    /// Appends keys and values of the rows to a cache in blocks, and attends over it. `new` are queries, keys and values.
    fn attention_paged(
        &self,
        _spec: &PagedSpec<'_>,
        _new: [&Tensor; 3],
        _caches: [&Tensor; 2],
        _out: &Tensor,
    ) -> Result<()> {
        Err(TensorError::argument("attention_paged", "this device has no kernel for it"))
    }
    /// Rotates the first `2·cos.last()` channels of each head in place, by tables `[batch or 1, tokens, pairs]` in f32.
    /// `inverse` rotates back, which is the gradient.
    fn rotary(
        &self,
        heads: &Heads<'_>,
        batch: usize,
        tokens: usize,
        head_count: usize,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> Result<()>;
    /// Looks rows up.
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: &Tensor) -> Result<()>;
    /// Scatter-adds rows in a fixed order; `dtable` is overwritten.
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: &Tensor) -> Result<()>;
    /// The type in which logits of a model in `dtype` are held.
    fn logits_dtype(&self, _dtype: DType) -> DType {
        DType::F32
    }
    /// How many rows of logits, each of this many bytes, a loss should hold at once: enough that the product which makes
    /// them is worth bringing the weight into order for, and little memory beyond that.
    fn logits_rows(&self, row_bytes: usize) -> usize {
        let fitting = |bytes: usize| bytes / row_bytes.max(1);
        fitting(16 << 20).max(fitting(64 << 20).min(256))
    }
    /// Per row of `logits [rows, classes]`, in [`Backend::logits_dtype`]: the loss into `losses [rows]`, and its gradient
    /// where it is wanted. The logits are lost where there is a gradient.
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: &Tensor,
        targets: &Tensor,
        losses: &Tensor,
        gradient: LossGradient<'_>,
    ) -> Result<()>;
    /// How many of `targets` differ from `ignore_index`, as one `I64`.
    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: &Tensor) -> Result<()>;
    /// The sum of `losses` in f64 over `counted`, as one f32; zero when none counts.
    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: &Tensor) -> Result<()>;
    /// `target = source · factor`, `factor` one f32, rounded to the target's type; both may be one tensor.
    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: &Tensor) -> Result<()>;
    /// Zeroes elements with probability `p`, scales the others by `1/(1-p)`.
    fn dropout(&self, x: &Tensor, y: &Tensor, p: f32, key: RandomKey) -> Result<()>;
    /// The same for rows of a larger tensor: row `i` begins at element `starts[i]` of it. Unless a device has a kernel for it,
    /// the host draws.
    fn dropout_rows(&self, x: &Tensor, y: &Tensor, p: f32, key: RandomKey, starts: &[u64]) -> Result<()> {
        let width = (x.numel() / starts.len().max(1)) as u64;
        let (threshold, scale) = (drop_threshold(p), 1.0 / (1.0 - p));
        let factor = |at: u64| if key.word(at) >= threshold { scale } else { 0.0 };
        let factors: Vec<f32> = starts.iter().flat_map(|&start| (start..start + width).map(factor)).collect();
        let factors = Tensor::from_slice(&factors, *x.shape(), x.device())?;
        let wide = Tensor::empty(*x.shape(), DType::F32, x.device())?;
        self.cast(x, &wide)?;
        let product = Tensor::empty(*x.shape(), DType::F32, x.device())?;
        self.binary(Binary::Mul, &wide, &factors, &product)?;
        self.cast(&product, y)
    }

    /// Elementwise.
    fn unary(&self, op: Unary, x: &Tensor, y: &Tensor) -> Result<()>;
    /// `dx = dy · f'(x)`.
    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: &Tensor) -> Result<()>;
    /// Elementwise with broadcasting.
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()>;
    /// `target += source`, same shape, rounded once.
    fn add_assign(&self, target: &Tensor, source: &Tensor) -> Result<()>;
    /// Elementwise comparison with broadcasting.
    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()>;
    /// `y = condition ? a : b` with broadcasting of all three.
    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<()>;
    /// Views `x` as `[outer, size, inner]` and reduces `size` away.
    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: &Tensor,
    ) -> Result<()>;
    /// Sums `x` down to `y`'s shape, undoing a broadcast.
    fn sum_to(&self, x: &Tensor, y: &Tensor) -> Result<()>;
    /// Softmax over the last dimension (`log`: its logarithm).
    fn softmax(&self, x: &Tensor, y: &Tensor, log: bool) -> Result<()>;
    /// Gradient of [`Backend::softmax`] from its result.
    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: &Tensor, log: bool) -> Result<()>;
    /// Running sums along the last dimension (`reverse`: from the end).
    fn cumsum(&self, x: &Tensor, y: &Tensor, reverse: bool) -> Result<()>;
    /// Reorders dimensions.
    fn permute(&self, x: &Tensor, order: &[usize], y: &Tensor) -> Result<()>;
    /// Copies `rows` blocks of `width` elements between strided places.
    fn copy_blocks(
        &self,
        source: &Tensor,
        source_offset: usize,
        source_stride: usize,
        target: &Tensor,
        target_offset: usize,
        target_stride: usize,
        rows: usize,
        width: usize,
    ) -> Result<()>;
    /// `y[o, i, :] = x[o, indices[i], :]` with `x` as `[outer, size, inner]`.
    fn index_select(
        &self,
        x: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: &Tensor,
    ) -> Result<()>;
    /// The gradient of [`Backend::index_select`]: adds rows in index order onto zeros.
    fn index_add(
        &self,
        dy: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        dx: &Tensor,
    ) -> Result<()>;
    /// `y[r, j] = x[r, indices[r, j]]` over the last dimension.
    fn gather(&self, x: &Tensor, indices: &Tensor, y: &Tensor) -> Result<()>;
    /// The gradient of [`Backend::gather`].
    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: &Tensor) -> Result<()>;
    /// The `k` largest of each row, largest first, lowest index first among equals.
    fn top_k(&self, x: &Tensor, k: usize, values: &Tensor, indices: &Tensor) -> Result<()>;
    /// Sorts slots by their group `ids`, in order within each: how many each group has into `counts`, and the two directions
    /// of [`RoutedRows`]. A slot whose id is the number of groups goes nowhere.
    fn sort_groups(&self, ids: &Tensor, counts: &Tensor, order: &Tensor, place: &Tensor) -> Result<()>;
    /// `y[row] = x[token of row]`, zero behind the last row.
    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: &Tensor) -> Result<()>;
    /// `y[token] = Σ weight·x[row]` over the token's slots in order, summed in f32; without weights each is one.
    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: &Tensor,
    ) -> Result<()>;
    /// Gradients of [`Backend::collect_rows`] from `[x, weights, dy]`.
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: &Tensor,
        dweights: &Tensor,
    ) -> Result<()>;
    /// Products of groups of rows, each with a matrix of its own.
    fn grouped_gemm(&self, grouped: &GroupedGemm<'_>) -> Result<()>;
    /// Of each group of rows, the product of one tensor's transposed with another's.
    fn grouped_outer(&self, grouped: &GroupedOuter<'_>) -> Result<()>;
    /// Of each group of rows that has a place for it, their sum.
    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: &[Option<Matrix<'_>>]) -> Result<()>;
    /// Patches of an NCHW image as rows: `[batch·oh·ow, channels·kh·kw]`.
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: &Tensor) -> Result<()>;
    /// Its transpose: adds patches back.
    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: &Tensor) -> Result<()>;
    /// Maximum over windows of an NCHW image, with the flat index of each maximum.
    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: &Tensor, indices: &Tensor) -> Result<()>;

    /// One optimizer step over flat tensors of this device, with gradients times `gradient_factor`; the pieces are alike in
    /// their types. Devices whose memory is the host's leave it to the optimizer's own loops.
    fn update(&self, _update: &Update, _gradient_factor: f32, _pieces: &[UpdateOperands]) -> Result<()> {
        Err(self.left_to_the_host("optimizer step"))
    }
    /// The largest magnitude in tensors of one type; infinity or NaN when there is one. Waits.
    fn largest_magnitude(&self, _pieces: &[&Tensor]) -> Result<f32> {
        Err(self.left_to_the_host("gradient norm"))
    }
    /// The sum of `x²·grid`, each rounded to the nearest integer first, so that the sum has no order. Waits.
    fn sum_of_squares(&self, _pieces: &[&Tensor], _grid: f64) -> Result<i128> {
        Err(self.left_to_the_host("gradient norm"))
    }
    /// Measures `gradients`, of one type, and does `updates` with them clipped, without the host in between. Where a gradient
    /// is not finite nothing is updated. Waits only for what it measures, while the updates still run. `None` where the
    /// three above have to be called one by one.
    fn clipped_updates(
        &self,
        _clipping: Clipping,
        _gradients: &[&Tensor],
        _updates: &[(Update, Vec<UpdateOperands>)],
    ) -> Result<Option<Measured>> {
        Ok(None)
    }
    /// The error of [`Backend::update`] and of what measures gradients on a host device.
    fn left_to_the_host(&self, op: &'static str) -> TensorError {
        TensorError::Unsupported { op, device: self.name(), why: "the host's own loops do it".into() }
    }
}

/// A copy to the host that was begun: call it for the bytes.
pub type ReadLater<'a> = Box<dyn FnOnce() -> Result<Vec<u8>> + 'a>;

/// How gradients are clipped: they are divided by `loss_scale`, and by as much as their norm exceeds `limit`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clipping {
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// The largest norm.
    pub limit: Option<f64>,
}

impl Clipping {
    /// What gradients of this norm, taken with the loss scale in them, are multiplied by.
    pub fn factor(&self, scaled_norm: f64) -> f32 {
        let norm = scaled_norm / self.loss_scale;
        let clip = self.limit.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0));
        (clip / self.loss_scale) as f32
    }
}

/// What [`Backend::clipped_updates`] has measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The largest magnitude; infinity or NaN where there is one, and then nothing was updated.
    pub largest: f32,
    /// The sum of squares on the grid of that magnitude: the power of two that brings its square to between 2⁵⁰ and 2⁵².
    pub squares: i128,
}

/// What an optimizer does to each element; the numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Update {
    /// Adam, or AdamW where `decoupled`. States: both moments.
    Adam {
        /// Whether weights decay directly instead of through the gradient.
        decoupled: bool,
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Weight decay; with `decoupled`, times the learning rate.
        decay: f32,
        /// The learning rate, corrected for the first moment's start at zero.
        step_size: f32,
        /// The root of one over the second moment's correction.
        inverse_root_correction: f32,
    },
    /// Gradient descent. State: the momentum, where there is one.
    Sgd {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// How much of the buffer stays.
        momentum: f32,
        /// The share of the gradient that enters it.
        entering: f32,
        /// Whether the update looks one step ahead.
        nesterov: bool,
    },
    /// Adagrad. State: the sum of squares.
    Adagrad {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// Added to the denominator.
        eps: f32,
    },
    /// Lion. State: the moment.
    Lion {
        /// Learning rate.
        lr: f32,
        /// What is left of a weight after decay.
        shrink: f32,
        /// Decay rates.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
    },
    /// LAMB's first pass. States: both moments, and where the direction goes.
    LambDirection {
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Whether under the root.
        eps_inside_sqrt: bool,
        /// Weight decay.
        decay: f32,
    },
    /// LAMB's second pass; the gradient is the direction. No states.
    LambApply {
        /// Multiplies the direction.
        step_size: f32,
    },
}

/// What [`Backend::update`] reads and writes: flat tensors of one length.
#[derive(Debug, Clone)]
pub struct UpdateOperands {
    /// f32 master weights.
    pub weights: Tensor,
    /// Their gradient.
    pub gradient: Tensor,
    /// The optimizer's f32 states.
    pub states: Vec<Tensor>,
    /// Where the rounded copy of the new weights goes.
    pub copy: Option<Tensor>,
}

/// A handle to a backend; cheap to clone, equal when it is the same object.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

impl Device {
    /// The CPU with the default number of threads, one object per process.
    pub fn cpu() -> Device {
        static SHARED: OnceLock<Device> = OnceLock::new();
        SHARED.get_or_init(|| Device::new(CpuBackend::new(crate::cpu::default_threads()))).clone()
    }

    /// Does something with each of some parts, on the host's threads that serve this device, and waits.
    pub fn each<P: Send>(&self, parts: impl Iterator<Item = P>, work: impl Fn(usize, P) + Send + Sync) {
        // Each task takes its own part out of the list, so none is shared.
        let parts: Vec<Mutex<Option<P>>> = parts.map(|part| Mutex::new(Some(part))).collect();
        self.backend().parallel(parts.len(), &|index| {
            let part = parts[index].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(part) = part {
                work(index, part);
            }
        });
    }

    /// A CPU device of its own, with its own pool and accounting.
    pub fn cpu_with_threads(threads: usize) -> Device {
        Device::new(CpuBackend::new(threads))
    }

    /// The CUDA device with this number among the visible ones.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Ok(Device::new(crate::cuda::CudaBackend::open(ordinal)?))
    }

    /// A device over any backend.
    pub fn new(backend: impl Backend + 'static) -> Device {
        Device(Arc::new(backend))
    }

    /// Its backend.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    /// What it holds.
    pub fn memory_usage(&self) -> MemoryUsage {
        self.0.memory_usage()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name())
    }
}

thread_local! {
    static CATEGORY: Cell<Category> = const { Cell::new(Category::Activations) };
}

/// The category that this thread's allocations are counted in.
pub fn current_category() -> Category {
    CATEGORY.get()
}

/// Runs `work` with this thread's allocations counted in `category`.
pub fn with_category<R>(category: Category, work: impl FnOnce() -> R) -> R {
    struct Restore(Category);
    impl Drop for Restore {
        fn drop(&mut self) {
            CATEGORY.set(self.0);
        }
    }
    let _restore = Restore(CATEGORY.replace(category));
    work()
}
