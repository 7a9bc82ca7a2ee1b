//! The passes of 1-bit optimizers. See `kernels/one_bit.cu`.

use ferrospeed_tensor::backend::{
    OneBit, OneBitOperands, OneBitPace, OneBitPass, Rounding, SignMessages, Signed,
};
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

use crate::table::{Entry, Table};
use crate::{BLOCK, CudaBackend, Kernel, Source, at, at_option, launch, real, signs};

/// What a pass measures of a piece, or of a chunk. Matches `Measures` in the kernels.
type Measures = [f64; 3];

/// Matches `Piece` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Piece {
    first: u64,
    count: u64,
    weights: u64,
    gradient: u64,
    states: [u64; 3],
    values: u64,
    copy: u64,
    number: f32,
    unused: u32,
}

impl Entry for Piece {
    fn count(&self) -> u64 {
        self.count
    }
    fn set_first(&mut self, first: u64) {
        self.first = first;
    }
}

impl From<&OneBitOperands> for Piece {
    fn from(operands: &OneBitOperands) -> Piece {
        Piece {
            first: 0,
            count: operands.weights.numel() as u64,
            weights: at(&operands.weights),
            gradient: at_option(operands.gradient.as_ref()),
            states: std::array::from_fn(|index| at_option(operands.states.get(index))),
            values: at_option(operands.values.as_ref()),
            copy: at_option(operands.copy.as_ref()),
            number: operands.number,
            unused: 0,
        }
    }
}

/// Matches `Pass` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Numbers {
    betas: [f32; 2],
    rest: [f32; 2],
    lr: f32,
    decay: f32,
    eps: f32,
    factor: f32,
}

impl Numbers {
    fn of(pass: &OneBitPass, factor: f32) -> Numbers {
        let zero = Numbers { factor, ..Numbers::default() };
        match *pass {
            OneBitPass::GiveMomentum { beta, rest } => {
                Numbers { betas: [beta, 0.0], rest: [rest, 0.0], ..zero }
            }
            OneBitPass::Take { beta, rest, pace } | OneBitPass::Travel { beta, rest, pace } => {
                let OneBitPace { lr, decay, eps } = pace;
                Numbers { betas: [beta, 0.0], rest: [rest, 0.0], lr, decay, eps, ..zero }
            }
            OneBitPass::GoBack { eps } | OneBitPass::Arrive { eps } => Numbers { eps, ..zero },
            OneBitPass::Direct { betas, rest, eps, decay }
            | OneBitPass::Correct { betas, rest, eps, decay } => Numbers { betas, rest, eps, decay, ..zero },
            OneBitPass::Sizes | OneBitPass::Follow => zero,
        }
    }
}

/// What a pass needs beside weights.
struct Needs {
    kernel: &'static str,
    measures: bool,
    gradient: bool,
    states: usize,
    values: bool,
}

fn needs(pass: &OneBitPass) -> Needs {
    let needs =
        |kernel, gradient, states, values| Needs { kernel, measures: false, gradient, states, values };
    let measuring = |needs: Needs| Needs { measures: true, ..needs };
    match pass {
        OneBitPass::GiveMomentum { .. } => needs("give_momentum", true, 1, true),
        OneBitPass::Take { .. } => needs("take", false, 2, true),
        OneBitPass::Travel { .. } => needs("travel", true, 3, false),
        OneBitPass::GoBack { .. } => needs("go_back", false, 3, true),
        OneBitPass::Arrive { .. } => needs("arrive", false, 3, true),
        OneBitPass::Sizes => measuring(needs("sizes", false, 1, false)),
        OneBitPass::Direct { .. } => measuring(needs("direct", true, 2, true)),
        OneBitPass::Correct { .. } => measuring(needs("correct", false, 3, true)),
        OneBitPass::Follow => needs("follow", false, 0, true),
    }
}

/// Refuses pieces that lack what a pass needs, or whose parts differ in length or type.
fn check(pass: &OneBitPass, needs: &Needs, pieces: &[OneBitOperands]) -> Result<()> {
    let refuse = |why: String| Err(TensorError::argument("1-bit optimizer", format!("{pass:?}: {why}")));
    let type_of = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::dtype);
    for piece in pieces {
        let lacks = needs.gradient && piece.gradient.is_none()
            || needs.values && piece.values.is_none()
            || piece.states.len() < needs.states;
        if lacks || piece.states.len() > 3 {
            return refuse(format!("it lacks operands, or has {} states", piece.states.len()));
        }
        let floats = || std::iter::once(&piece.weights).chain(&piece.states).chain(&piece.values);
        if let Some(other) = floats().find(|tensor| tensor.dtype() != DType::F32) {
            return refuse(format!("{other:?} is not f32"));
        }
        let numel = piece.weights.numel();
        let others = floats().chain(&piece.gradient).chain(&piece.copy);
        if let Some(other) = others.into_iter().find(|tensor| tensor.numel() != numel) {
            return refuse(format!("{other:?} beside {numel} weights"));
        }
        let like = |of: fn(&OneBitOperands) -> &Option<Tensor>| type_of(of(piece)) == type_of(of(&pieces[0]));
        if !like(|piece| &piece.gradient) || !like(|piece| &piece.copy) {
            return refuse("its pieces differ in their types".into());
        }
    }
    Ok(())
}

/// Submits a pass; what it measures of each piece goes to `measures`.
fn submit(
    backend: &CudaBackend,
    pass: &OneBitPass,
    factor: f32,
    pieces: &[OneBitOperands],
    measures: u64,
) -> Result<()> {
    let Some(example) = pieces.first() else { return Ok(()) };
    let needs = needs(pass);
    check(pass, &needs, pieces)?;
    let gradient = example.gradient.as_ref().map_or(DType::F32, Tensor::dtype);
    let copy = match example.copy.as_ref().map(Tensor::dtype) {
        Some(DType::F16) => "COPY=f16",
        Some(DType::F32) => "COPY=float",
        _ => "COPY=bf16",
    };
    let defines = [real("1-bit optimizer", gradient)?, copy, ""];
    let kernel = |name| Kernel { source: Source::OneBit, defines, name };
    let numbers = Numbers::of(pass, factor);
    let table = Table::new(backend, pieces.iter().map(Piece::from).collect())?;
    let (memory, grid, block) = (table.memory.address(), table.grid(backend), [BLOCK, 1, 1]);
    let name = needs.kernel;
    if !needs.measures {
        return launch!(backend, kernel(name), grid, block, 0, memory, table.number, table.chunks, numbers);
    }
    let parts = backend.scratch(size_of::<Measures>() * table.chunks.max(1) as usize)?;
    let part = parts.address();
    launch!(backend, kernel(name), grid, block, 0, memory, table.number, table.chunks, numbers, part)?;
    launch!(backend, kernel("settle_measures"), [table.number, 1, 1], block, 0, memory, part, measures)
}

impl OneBit for CudaBackend {
    fn one_bit(&self, gradient_factor: f32, passes: &[(OneBitPass, Vec<OneBitOperands>)]) -> Result<()> {
        for (pass, pieces) in passes {
            if needs(pass).measures {
                let why = format!("{pass:?} measures: ask for that");
                return Err(TensorError::argument("1-bit optimizer", why));
            }
            submit(self, pass, gradient_factor, pieces, 0)?;
        }
        Ok(())
    }

    fn one_bit_measured(
        &self,
        gradient_factor: f32,
        passes: &[(OneBitPass, Vec<OneBitOperands>)],
    ) -> Result<Vec<[f64; 3]>> {
        let mut measures = vec![Measures::default(); passes.iter().map(|(_, pieces)| pieces.len()).sum()];
        let there = self.scratch(size_of_val(&measures[..]))?;
        self.zero_bytes(there.address(), size_of_val(&measures[..]))?;
        let mut next = there.address();
        for (pass, pieces) in passes {
            submit(self, pass, gradient_factor, pieces, next)?;
            next += (size_of::<Measures>() * pieces.len()) as u64;
        }
        self.read(there.address(), bytemuck::cast_slice_mut(&mut measures))?;
        Ok(measures)
    }

    fn round_to_signs(
        &self,
        tensors: &[Rounding<'_>],
        received: Option<SignMessages<'_>>,
        sent: SignMessages<'_>,
    ) -> Result<()> {
        signs::round(self, tensors, received, sent)
    }

    fn take_signs(&self, tensors: &[Signed<'_>], received: SignMessages<'_>) -> Result<()> {
        signs::take(self, tensors, received)
    }
}
