//! Elementwise kernels: `kernels/elementwise.cu`.

use ferrospeed_tensor::backend::{Binary, Broadcasts, Comparison, Pointwise, RoutedRows, Unary};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::shape::MAX_DIMS;
use ferrospeed_tensor::{Activation, DType, Out, Result, Shape, Tensor, TensorError};

use crate::{BLOCK, CudaBackend, KEPT_ACTIVATION_WIDTH, Kernel, Source, at, launch, layout, real, reduce};

/// The result's sizes and each operand's strides seen from it. Matches `Broadcast` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Broadcast {
    dims: u32,
    unused: u32,
    size: [u64; MAX_DIMS],
    stride: [[u64; MAX_DIMS]; 3],
}

impl Broadcast {
    pub(super) fn new(target: &Shape, operands: &[&Shape]) -> Broadcast {
        let mut broadcast = Broadcast::of_sizes(target.sizes());
        for (stride, operand) in broadcast.stride.iter_mut().zip(operands) {
            let missing = target.dims() - operand.dims();
            for (dim, &own) in operand.strides().iter().enumerate() {
                stride[missing + dim] = if operand[dim] == 1 { 0 } else { own as u64 };
            }
        }
        broadcast
    }

    /// Sizes with the strides of one operand given.
    pub(super) fn strided(sizes: &[usize], strides: &[usize]) -> Broadcast {
        let mut broadcast = Broadcast::of_sizes(sizes);
        strides.iter().enumerate().for_each(|(dim, &stride)| broadcast.stride[0][dim] = stride as u64);
        broadcast
    }

    fn of_sizes(sizes: &[usize]) -> Broadcast {
        let mut size = [1; MAX_DIMS];
        sizes.iter().enumerate().for_each(|(dim, &own)| size[dim] = own as u64);
        Broadcast { dims: sizes.len() as u32, unused: 0, size, stride: [[0; MAX_DIMS]; 3] }
    }
}

/// Matches `RandomKey` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceKey {
    seed: u64,
    stream: u32,
    step: u32,
}

impl From<RandomKey> for DeviceKey {
    fn from(key: RandomKey) -> DeviceKey {
        DeviceKey { seed: key.seed, stream: key.stream, step: key.step }
    }
}

pub(super) fn activation_number(activation: Activation) -> i32 {
    match activation {
        Activation::GeluErf => 0,
        Activation::GeluTanh => 1,
        Activation::QuickGelu => 2,
        Activation::Silu => 3,
        Activation::Relu => 4,
        Activation::Tanh => 5,
        Activation::Sigmoid => 6,
    }
}

/// The kernel's number of a function and its two constants.
fn number(op: Unary) -> (i32, f32, f32) {
    match op {
        Unary::Activation(activation) => (activation_number(activation), 0.0, 0.0),
        Unary::Neg => (7, 0.0, 0.0),
        Unary::Exp => (8, 0.0, 0.0),
        Unary::Log => (9, 0.0, 0.0),
        Unary::Sqrt => (10, 0.0, 0.0),
        Unary::Square => (11, 0.0, 0.0),
        Unary::Abs => (12, 0.0, 0.0),
        Unary::Reciprocal => (13, 0.0, 0.0),
        Unary::Affine { scale, shift } => (14, scale, shift),
        Unary::Power(n) => (15, n, 0.0),
    }
}

/// A kernel of this file for a type; sums may have a second one.
fn kernel(op: &'static str, dtype: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Elementwise, defines: [real(op, dtype)?, "SOURCE=float", ""], name })
}

impl CudaBackend {
    pub(super) fn unary_into(&self, op: Unary, x: &Tensor, y: &Tensor) -> Result<()> {
        let (op, p, q) = number(op);
        let count = x.numel() as u64;
        let kernel = kernel("unary", x.dtype(), "unary")?;
        let grid = self.grid(x.numel());
        launch!(overlapping self, kernel, grid, [BLOCK, 1, 1], 0, count, at(x), at(y), op, p, q)
    }
}

pub(super) fn unary_backward(
    backend: &CudaBackend,
    op: Unary,
    x: &Tensor,
    dy: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let (op, p, _) = number(op);
    let kernel = kernel("unary_backward", x.dtype(), "unary_backward")?;
    let grid = backend.grid(x.numel());
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, x.numel() as u64, at(x), at(dy), at(dx), op, p)
}

pub(super) fn activation_backward_in_place(
    backend: &CudaBackend,
    activation: Activation,
    before: &Tensor,
    gradient: &Tensor,
) -> Result<()> {
    let op = activation_number(activation);
    let kernel = kernel("activation_backward", before.dtype(), "activation_backward_in_place")?;
    let grid = backend.grid(before.numel());
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, before.numel() as u64, at(before), at(gradient), op)
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
        activation_backward_in_place(self, activation, before.into_tensor(), gradient.into_tensor())
    }

    fn kept_activation_width(&self) -> usize {
        KEPT_ACTIVATION_WIDTH
    }

    /// In one pass where rows are whole packs, else in two.
    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
        rebuilds: bool,
        sums: Option<Out<'_>>,
    ) -> Result<()> {
        let before = before.into_tensor();
        let gradient = gradient.into_tensor();
        let sums = sums.map(Out::into_tensor);
        let (rows, width) = (gradient.shape().rows(), gradient.shape().last());
        let wide = width.is_multiple_of(8) && (at(before) | at(gradient)).is_multiple_of(16);
        let Some(sums) = sums.filter(|_| wide && gradient.numel() > 0) else {
            if rebuilds {
                activation_backward_in_place(self, activation, before, gradient)?;
            } else {
                unary_backward(self, Unary::Activation(activation), before, gradient, gradient)?;
            }
            return sums.map_or(Ok(()), |sums| reduce::sum_rows(self, gradient, sums));
        };
        let op = activation_number(activation);
        let kernel = kernel("activation_backward", before.dtype(), "activation_backward_sums")?;
        let tiles = reduce::Tiles::new(self, rows, width, 16);
        let partial = self.scratch(tiles.slices * width * 4)?;
        launch!(
            overlapping self,
            kernel,
            tiles.grid(),
            reduce::Tiles::BLOCK,
            0,
            rows as u64,
            width as u64,
            tiles.slice_rows as u64,
            at(before),
            at(gradient),
            op,
            i32::from(rebuilds),
            partial.address()
        )?;
        reduce::finish_rows(self, tiles.slices, width, &[(partial.address(), sums)])
    }

    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let op = activation_number(activation);
        let kernel = kernel("gated", gate.dtype(), "gated")?;
        let grid = self.grid(gate.numel());
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, gate.numel() as u64, at(gate), at(up), at(y), op)
    }

    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: Out<'_>,
        up: Out<'_>,
        dy: Out<'_>,
        rebuilds: bool,
    ) -> Result<()> {
        let gate = gate.into_tensor();
        let up = up.into_tensor();
        let dy = dy.into_tensor();
        let op = activation_number(activation);
        let kernel = kernel("gated_backward_in_place", gate.dtype(), "gated_backward_in_place")?;
        let (grid, count) = (self.grid(gate.numel()), gate.numel() as u64);
        launch!(
            self,
            kernel,
            grid,
            [BLOCK, 1, 1],
            0,
            count,
            at(gate),
            at(up),
            at(dy),
            op,
            i32::from(rebuilds)
        )
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
        let dgate = dgate.into_tensor();
        let dup = dup.into_tensor();
        let op = activation_number(activation);
        let kernel = kernel("gated_backward", gate.dtype(), "gated_backward")?;
        let (grid, count) = (self.grid(gate.numel()), gate.numel() as u64);
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, count, at(gate), at(up), at(dy), at(dgate), at(dup), op)
    }

    fn scale_in_place(&self, target: Out<'_>, factor: &Tensor) -> Result<()> {
        let target = target.into_tensor();
        layout::scale_by(self, target, factor, target)
    }

    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: Out<'_>) -> Result<()> {
        layout::scale_by(self, source, factor, target.into_tensor())
    }

    fn dropout(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey) -> Result<()> {
        let y = y.into_tensor();
        let threshold = ferrospeed_tensor::random::drop_threshold(p);
        let kernel = kernel("dropout", x.dtype(), "dropout")?;
        let (grid, key) = (self.grid(x.numel()), DeviceKey::from(key));
        let scale = 1.0 / (1.0 - p);
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, x.numel() as u64, at(x), at(y), threshold, scale, key)
    }

    fn dropout_rows(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey, starts: &[u64]) -> Result<()> {
        let y = y.into_tensor();
        let starts: Vec<i64> = starts.iter().map(|&start| start as i64).collect();
        let width = x.numel() / starts.len().max(1);
        let starts = Tensor::from_slice(&starts, [starts.len()], x.device())?;
        launch!(
            self,
            kernel("dropout_rows", x.dtype(), "dropout_rows")?,
            self.grid_single(x.numel()),
            [BLOCK, 1, 1],
            0,
            x.numel() as u64,
            width as u64,
            at(&starts),
            at(x),
            at(y),
            ferrospeed_tensor::random::drop_threshold(p),
            1.0 / (1.0 - p),
            DeviceKey::from(key)
        )
    }

    fn unary(&self, op: Unary, x: &Tensor, y: Out<'_>) -> Result<()> {
        self.unary_into(op, x, y.into_tensor())
    }

    fn unary_in_place(&self, op: Unary, x: Out<'_>) -> Result<()> {
        let x = x.into_tensor();
        self.unary_into(op, x, x)
    }

    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: Out<'_>) -> Result<()> {
        unary_backward(self, op, x, dy, dx.into_tensor())
    }

    fn add_assign(&self, target: Out<'_>, source: &Tensor) -> Result<()> {
        let target = target.into_tensor();
        if target.shape() != source.shape() {
            return Err(TensorError::ShapeMismatch {
                op: "add_assign",
                left: *target.shape(),
                right: *source.shape(),
            });
        }
        let source_type = match source.dtype() {
            DType::BF16 => "SOURCE=bf16",
            DType::F16 => "SOURCE=f16",
            _ => "SOURCE=float",
        };
        real("add_assign", source.dtype())?;
        let defines = [real("add_assign", target.dtype())?, source_type, ""];
        let kernel = Kernel { source: Source::Elementwise, defines, name: "add_assign" };
        launch!(
            self,
            kernel,
            self.grid(target.numel()),
            [BLOCK, 1, 1],
            0,
            target.numel() as u64,
            at(target),
            at(source)
        )
    }
}

impl Broadcasts for CudaBackend {
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let op = match op {
            Binary::Add => 0i32,
            Binary::Sub => 1,
            Binary::Mul => 2,
            Binary::Div => 3,
            Binary::Max => 4,
            Binary::Min => 5,
        };
        let count = y.numel() as u64;
        if a.shape() == y.shape() && b.shape() == y.shape() {
            let kernel = kernel("binary", a.dtype(), "binary_same")?;
            return launch!(
                self,
                kernel,
                self.grid(y.numel()),
                [BLOCK, 1, 1],
                0,
                count,
                at(a),
                at(b),
                at(y),
                op
            );
        }
        if a.shape() == y.shape() && repeats(b.shape(), y.shape()) {
            let kernel = kernel("binary", a.dtype(), "binary_repeat")?;
            let (grid, period) = (self.grid(y.numel()), b.numel().max(1) as u64);
            return launch!(self, kernel, grid, [BLOCK, 1, 1], 0, count, period, at(a), at(b), at(y), op);
        }
        let shape = Broadcast::new(y.shape(), &[a.shape(), b.shape()]);
        let kernel = kernel("binary", a.dtype(), "binary_broadcast")?;
        let grid = self.grid_single(y.numel());
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, count, at(a), at(b), at(y), op, shape)
    }

    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let op = match op {
            Comparison::Equal => 0i32,
            Comparison::Less => 1,
            Comparison::LessEqual => 2,
        };
        // Floats compare as floats, integers exactly.
        let defines = match a.dtype() {
            DType::I64 => ["REAL=i64", "INDEX=i64", "EXACT"],
            DType::I32 => ["REAL=int", "INDEX=i64", "EXACT"],
            DType::U8 | DType::Bool => ["REAL=u8", "INDEX=i64", "EXACT"],
            dtype => [real("compare", dtype)?, "INDEX=i64", ""],
        };
        let kernel = Kernel { source: Source::Move, defines, name: "compare" };
        let shape = Broadcast::new(y.shape(), &[a.shape(), b.shape()]);
        let grid = self.grid_single(y.numel());
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, y.numel() as u64, at(a), at(b), at(y), op, shape)
    }

    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let shape = Broadcast::new(y.shape(), &[condition.shape(), a.shape(), b.shape()]);
        let kernel = kernel("select", a.dtype(), "select_broadcast")?;
        let (grid, count) = (self.grid_single(y.numel()), y.numel() as u64);
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, count, at(condition), at(a), at(b), at(y), shape)
    }

    fn sum_to(&self, x: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let missing = x.shape().dims() - y.shape().dims();
        let strides = x.shape().strides();
        let is_kept = |dim: usize| dim >= missing && y.shape()[dim - missing] == x.shape()[dim];
        let list = |kept: bool| -> (Vec<usize>, Vec<usize>) {
            (0..x.shape().dims())
                .filter(|&dim| is_kept(dim) == kept)
                .map(|dim| (x.shape()[dim], strides[dim]))
                .unzip()
        };
        let (kept, summed) = (list(true), list(false));
        let repeats = summed.0.iter().product::<usize>();
        let is_leading = (1..x.shape().dims()).all(|dim| is_kept(dim) || !is_kept(dim - 1));
        if is_leading && y.numel() > 0 {
            return reduce::sum_rows(self, &x.view([repeats, y.numel()])?, &y.view([y.numel()])?);
        }
        let repeats = repeats as u64;
        let (own, summed) = (Broadcast::strided(&kept.0, &kept.1), Broadcast::strided(&summed.0, &summed.1));
        let kernel = kernel("sum_to", x.dtype(), "sum_to")?;
        let grid = self.grid_single(y.numel());
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, y.numel() as u64, repeats, at(x), at(y), own, summed)
    }
}

pub(super) fn weighted_gated_backward(
    backend: &CudaBackend,
    activation: Activation,
    rows: &RoutedRows<'_>,
    weights: &Tensor,
    [gate, up, dy]: [&Tensor; 3],
    dweights: &Tensor,
) -> Result<()> {
    backend.zero_bytes(at(dweights), dweights.size_bytes())?;
    let (count, width) = (rows.order.numel(), gate.shape().last());
    if count == 0 {
        return Ok(());
    }
    let kernel = kernel("weighted_gated_backward", gate.dtype(), "weighted_gated_backward")?;
    let threads = width.div_ceil(8).next_multiple_of(32).clamp(32, BLOCK as usize) as u32;
    launch!(
        backend,
        kernel,
        [count as u32, 1, 1],
        [threads, 1, 1],
        0,
        width as u64,
        at(rows.order),
        at(weights),
        at(gate),
        at(up),
        at(dy),
        at(dweights),
        activation_number(activation)
    )
}

/// Whether a tensor is repeated whole to fill `target`: its sizes are the target's last ones, behind ones.
fn repeats(own: &Shape, target: &Shape) -> bool {
    let sizes: Vec<usize> = own.sizes().iter().copied().skip_while(|&size| size == 1).collect();
    target.sizes().ends_with(&sizes)
}
