//! Parameters: handles whose values are borrowed.
//!
//! A [`Param`] is an identity: a name, a shape, how it starts. Its bytes are the business of a [`ParamStore`],
//! which may hold them whole, spread over ranks, on disk or quantised. [`Param::read`] borrows the value; while
//! the guard lives the value is resident. The tape saves handles, never values, so a store may drop a weight
//! between forward and backward. A gradient is pushed to the store the moment the last use has produced it.
//!
//! A model is built from unattached handles, which cost nothing: no rank ever holds a value that its store does
//! not want it to hold. See [`crate::store`] for the stores of this crate.

mod slice;

use std::ops::{Deref, Range};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::lent::Lent;
use crate::packed::PackedWeight;
use crate::profile;
use crate::random::{RandomKey, stream_of_name};
use crate::rows::RowGradient;
use crate::shape::Shape;
use crate::tensor::Tensor;

pub use slice::Slice;

/// How a parameter's value starts. Any slice of it can be made alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initializer {
    /// One value.
    Constant(f32),
    /// Normal numbers.
    Normal {
        /// Their mean.
        mean: f32,
        /// Their standard deviation.
        std: f32,
    },
    /// Uniform numbers in `-bound..bound`.
    Uniform {
        /// Half the width.
        bound: f32,
    },
}

impl Initializer {
    /// The values of elements `range` of the parameter `name`.
    pub fn fill(&self, seed: u64, name: &str, range: Range<usize>, out: &mut [f32]) {
        debug_assert_eq!(range.len(), out.len());
        let key = RandomKey::new(seed, stream_of_name(name));
        match *self {
            Initializer::Constant(value) => out.fill(value),
            Initializer::Normal { mean, std } => {
                key.fill_normal(range.start as u64, out);
                out.iter_mut().for_each(|value| *value = mean + std * *value);
            }
            Initializer::Uniform { bound } => {
                for (position, value) in range.zip(out) {
                    *value = bound * (2.0 * key.uniform(position as u64) - 1.0);
                }
            }
        }
    }
}

/// A failure inside a store; the tensor error that carries it names the parameter.
pub type StoreError = Box<dyn std::error::Error + Send + Sync>;

/// Where parameters' bytes live.
pub trait ParamStore: Send + Sync {
    /// Makes the value of parameter `index` resident and returns it. Paired with one [`ParamStore::release`]. A store that
    /// will write other values to the same memory lends it by [`crate::Borrows`] and asks that before it writes.
    fn acquire(&self, index: usize) -> Result<Tensor, StoreError>;
    /// Ends one borrow; after the last one the store may drop the value.
    fn release(&self, index: usize);
    /// Takes the gradient of parameter `index`, complete for this backward.
    fn push_grad(&self, index: usize, gradient: Tensor) -> Result<(), StoreError>;
    /// Memory that the gradient of parameter `index` may be written to before it is pushed, so that the store need not copy
    /// it; what it holds before is undefined.
    fn lend_place(&self, _index: usize) -> Result<Option<Lent>, StoreError> {
        Ok(None)
    }
    /// The value of parameter `index` in few bits, where it is held so. What [`ParamStore::acquire`] gives is made of it.
    fn packed(&self, _index: usize) -> Option<Arc<PackedWeight>> {
        None
    }
    /// Whether values stay where they are for as long as the store lives, borrowed or not.
    fn values_stay(&self) -> bool {
        false
    }
    /// Whether it would rather take [`ParamStore::push_rows`] for parameter `index`.
    fn wants_rows(&self, _index: usize) -> bool {
        false
    }
    /// As [`ParamStore::push_grad`], with the rows that are not zero.
    fn push_rows(&self, index: usize, gradient: RowGradient) -> Result<(), StoreError> {
        self.push_grad(index, gradient.to_dense()?)
    }
}

/// A module whose parameters come and go as one, whichever of them is read: what a router or a condition chooses among
/// must not change what ranks do together. Parameters say which one they are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit(u64);

impl Unit {
    /// A new one.
    #[allow(clippy::new_without_default)] // Two of them are never the same, so there is no default.
    pub fn new() -> Unit {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Unit(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

struct Attachment {
    store: Arc<dyn ParamStore>,
    index: usize,
    dtype: DType,
}

struct Inner {
    id: u64,
    name: String,
    shape: Shape,
    slice: Option<Slice>,
    initializer: Initializer,
    trainable: AtomicBool,
    is_table: AtomicBool,
    is_inputs_first: AtomicBool,
    unit: OnceLock<Unit>,
    attachment: OnceLock<Attachment>,
}

/// A handle to a parameter. Clones are the same parameter: tying is cloning.
#[derive(Clone)]
pub struct Param(Arc<Inner>);

impl Param {
    /// A new parameter without a value.
    pub fn new(name: impl Into<String>, shape: impl Into<Shape>, initializer: Initializer) -> Param {
        Param::make(name.into(), shape.into(), None, initializer)
    }

    /// A new parameter that is a slice of a whole. It starts as that part of the whole would.
    pub fn sliced(name: impl Into<String>, slice: Slice, initializer: Initializer) -> Param {
        Param::make(name.into(), slice.shape(), Some(slice), initializer)
    }

    fn make(name: String, shape: Shape, slice: Option<Slice>, initializer: Initializer) -> Param {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Param(Arc::new(Inner {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name,
            shape,
            slice,
            initializer,
            trainable: AtomicBool::new(true),
            is_table: AtomicBool::new(false),
            is_inputs_first: AtomicBool::new(false),
            unit: OnceLock::new(),
            attachment: OnceLock::new(),
        }))
    }

    /// Its name: the path of the module that made it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its shape, wherever its bytes are.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// Which part of a whole it is, where it is one.
    pub fn slice(&self) -> Option<&Slice> {
        self.0.slice.as_ref()
    }

    /// The shape of the whole that it is a slice of, or its own.
    pub fn whole_shape(&self) -> &Shape {
        self.slice().map_or(&self.0.shape, Slice::whole)
    }

    /// Hands out elements `range` as runs of elements of the whole, each with the part of `out` that it is for.
    pub fn each_run<E>(
        &self,
        range: Range<usize>,
        out: &mut [f32],
        mut take: impl FnMut(Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(slice) = self.slice() else { return take(range, out) };
        let mut rest = out;
        for run in slice.runs(range) {
            let (now, later) = rest.split_at_mut(run.len());
            take(run, now)?;
            rest = later;
        }
        Ok(())
    }

    /// The number of its elements.
    pub fn numel(&self) -> usize {
        self.0.shape.numel()
    }

    /// How it starts.
    pub fn initializer(&self) -> Initializer {
        self.0.initializer
    }

    /// The type its readers get; f32 until a store says otherwise.
    pub fn dtype(&self) -> DType {
        self.0.attachment.get().map_or(DType::F32, |attachment| attachment.dtype)
    }

    /// Whether its value stays where it is for as long as the parameter lives, so that a recording may hold its address.
    pub fn value_stays(&self) -> bool {
        self.0.attachment.get().is_some_and(|attachment| attachment.store.values_stay())
    }

    /// Whether it gets gradients.
    pub fn is_trainable(&self) -> bool {
        self.0.trainable.load(Ordering::Relaxed)
    }

    /// Freezes or thaws it. Takes effect with the next forward.
    pub fn set_trainable(&self, trainable: bool) {
        self.0.trainable.store(trainable, Ordering::Relaxed);
    }

    /// Says that it is a table `[entries, width]` whose rows are looked up, so that few of them get gradients.
    pub fn as_table(self) -> Param {
        self.0.is_table.store(true, Ordering::Relaxed);
        self
    }

    /// Whether it is such a table.
    pub fn is_table(&self) -> bool {
        self.0.is_table.load(Ordering::Relaxed)
    }

    /// Says that it is the weight `[inputs, outputs]` of a linear layer; other layers have `[outputs, inputs]`.
    pub fn as_inputs_first(self) -> Param {
        self.0.is_inputs_first.store(true, Ordering::Relaxed);
        self
    }

    /// Whether it is such a weight.
    pub fn is_inputs_first(&self) -> bool {
        self.0.is_inputs_first.load(Ordering::Relaxed)
    }

    /// Says that it comes and goes together with the others of a unit. The first unit it is put in stays its own.
    pub fn in_unit(self, unit: Unit) -> Param {
        self.0.unit.get_or_init(|| unit);
        self
    }

    /// The unit it is of.
    pub fn unit(&self) -> Option<Unit> {
        self.0.unit.get().copied()
    }

    /// Whether two handles are one parameter.
    pub fn is_same(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that is this parameter's alone within the process.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Gives the parameter its store. A store calls this once for each of its parameters.
    pub fn attach(&self, store: Arc<dyn ParamStore>, index: usize, dtype: DType) -> Result<()> {
        self.0
            .attachment
            .set(Attachment { store, index, dtype })
            .map_err(|_| TensorError::AlreadyAttached { name: self.0.name.clone() })
    }

    fn attachment(&self) -> Result<&Attachment> {
        self.0.attachment.get().ok_or_else(|| TensorError::Unattached { name: self.0.name.clone() })
    }

    fn store_error(&self, source: StoreError) -> TensorError {
        TensorError::Store { name: self.0.name.clone(), source }
    }

    /// Borrows the value. While the guard or a tensor that was made of it without copying (a clone, a view, a slice) is there,
    /// what would change the value is refused and names this line: an optimizer's step, a checkpoint that is loaded.
    #[track_caller]
    pub fn read(&self) -> Result<Value> {
        let attachment = self.attachment()?;
        let tensor = attachment.store.acquire(attachment.index).map_err(|source| self.store_error(source))?;
        if let Some(borrow) = tensor.borrow() {
            borrow.note(Location::caller());
        }
        let value = Value { tensor, borrowed: Some(self.clone()) };
        if value.shape() != self.shape() {
            return Err(TensorError::ShapeMismatch {
                op: "param.read",
                left: *self.shape(),
                right: *value.shape(),
            });
        }
        Ok(value)
    }

    /// Its value in few bits, where its store holds it so.
    pub(crate) fn packed(&self) -> Option<Arc<PackedWeight>> {
        self.0.attachment.get().and_then(|attachment| attachment.store.packed(attachment.index))
    }

    /// Whether its store would rather have the rows of a lookup's gradient than all of it.
    pub fn wants_rows(&self) -> bool {
        self.0.attachment.get().is_some_and(|attachment| attachment.store.wants_rows(attachment.index))
    }

    /// Hands a complete gradient to the store, as the rows that are not zero.
    pub fn push_rows(&self, gradient: RowGradient) -> Result<()> {
        let attachment = self.attachment()?;
        attachment.store.push_rows(attachment.index, gradient).map_err(|source| self.store_error(source))
    }

    /// Memory of the store that one gradient may be written to: see [`ParamStore::lend_place`].
    pub(crate) fn lend_place(&self) -> Result<Option<Lent>> {
        let attachment = self.attachment()?;
        attachment.store.lend_place(attachment.index).map_err(|source| self.store_error(source))
    }

    /// Hands a complete gradient to the store.
    pub fn push_grad(&self, gradient: Tensor) -> Result<()> {
        if gradient.shape() != self.shape() {
            return Err(TensorError::ShapeMismatch {
                op: "push_grad",
                left: *self.shape(),
                right: *gradient.shape(),
            });
        }
        let attachment = self.attachment()?;
        attachment.store.push_grad(attachment.index, gradient).map_err(|source| self.store_error(source))
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Param({} {}{})", self.name(), self.dtype(), self.shape())
    }
}

/// A value that is resident while this lives. Dereferences to the tensor.
pub struct Value {
    tensor: Tensor,
    borrowed: Option<Param>,
}

impl Deref for Value {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        if let Some(attachment) = self.borrowed.as_ref().and_then(|param| param.0.attachment.get()) {
            attachment.store.release(attachment.index);
        }
    }
}

/// What an op takes: a tensor, or a parameter that it will borrow for as long as it runs.
#[derive(Clone, Debug)]
pub enum Operand {
    /// A tensor.
    Tensor(Tensor),
    /// A parameter.
    Param(Param),
}

impl Operand {
    /// Its value in few bits, where it is held so.
    pub(crate) fn packed(&self) -> Option<Arc<PackedWeight>> {
        match self {
            Operand::Tensor(_) => None,
            Operand::Param(param) => param.packed(),
        }
    }

    /// Borrows the value, all of which is read.
    #[track_caller]
    pub fn read(&self) -> Result<Value> {
        let value = self.look()?;
        profile::count_bytes(value.size_bytes());
        Ok(value)
    }

    /// Borrows the value, of which some is read.
    #[track_caller]
    pub(crate) fn look(&self) -> Result<Value> {
        match self {
            Operand::Tensor(tensor) => Ok(Value { tensor: tensor.clone(), borrowed: None }),
            Operand::Param(param) => param.read(),
        }
    }

    /// What the tape keeps: the handle, or the tensor without its own history.
    pub fn saved(&self) -> Operand {
        match self {
            Operand::Tensor(tensor) => Operand::Tensor(tensor.detach()),
            Operand::Param(param) => Operand::Param(param.clone()),
        }
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        match self {
            Operand::Tensor(tensor) => tensor.shape(),
            Operand::Param(param) => param.shape(),
        }
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        match self {
            Operand::Tensor(tensor) => tensor.dtype(),
            Operand::Param(param) => param.dtype(),
        }
    }

    /// Whether a gradient is wanted for it.
    pub fn requires_grad(&self) -> bool {
        match self {
            Operand::Tensor(tensor) => tensor.requires_grad(),
            Operand::Param(param) => param.is_trainable(),
        }
    }
}

impl From<&Tensor> for Operand {
    fn from(tensor: &Tensor) -> Self {
        Operand::Tensor(tensor.clone())
    }
}

impl From<Tensor> for Operand {
    fn from(tensor: Tensor) -> Self {
        Operand::Tensor(tensor)
    }
}

impl From<&Param> for Operand {
    fn from(param: &Param) -> Self {
        Operand::Param(param.clone())
    }
}

impl From<&Operand> for Operand {
    fn from(operand: &Operand) -> Self {
        operand.clone()
    }
}
