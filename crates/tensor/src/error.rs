//! The one error of this crate. Every variant carries its operands.

use crate::dtype::DType;
use crate::shape::Shape;

/// What can go wrong with tensors, the tape and parameters.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// Two operands do not fit together.
    #[error("{op}: shapes {left} and {right} do not fit together")]
    ShapeMismatch {
        /// The operation.
        op: &'static str,
        /// The first operand's shape.
        left: Shape,
        /// The second operand's shape.
        right: Shape,
    },
    /// One operand has a shape the operation cannot take.
    #[error("{op}: {what} has shape {shape}, expected {expected}")]
    BadShape {
        /// The operation.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// Its shape.
        shape: Shape,
        /// What it should be, in words.
        expected: String,
    },
    /// An operand has a type the operation cannot take.
    #[error("{op}: {what} is {dtype}, expected {expected}")]
    BadDType {
        /// The operation.
        op: &'static str,
        /// Which operand.
        what: &'static str,
        /// Its type.
        dtype: DType,
        /// What it should be, in words.
        expected: &'static str,
    },
    /// An index lies outside its dimension.
    #[error("{op}: index {index} at position {position} is outside 0..{limit}")]
    IndexOutOfRange {
        /// The operation.
        op: &'static str,
        /// The index.
        index: i64,
        /// Where in the index tensor it stands.
        position: usize,
        /// The size of the dimension.
        limit: usize,
    },
    /// A value outside what the operation accepts.
    #[error("{op}: {what}")]
    BadArgument {
        /// The operation.
        op: &'static str,
        /// What is wrong, with the value.
        what: String,
    },
    /// Backward was asked of a tensor that no recorded operation made.
    #[error(
        "backward: the tensor (shape {shape}) was not computed from anything that requires a gradient; was it made under no_grad?"
    )]
    NoGraph {
        /// The tensor's shape.
        shape: Shape,
    },
    /// Backward passed through a node whose saved values an earlier backward has freed.
    #[error(
        "backward: the graph at '{node}' was already used and freed by an earlier backward; run forward again to backward again"
    )]
    GraphFreed {
        /// The operation whose node is gone.
        node: &'static str,
    },
    /// Backward of a non-scalar needs an explicit gradient.
    #[error("backward: a tensor of shape {shape} needs an explicit gradient; only a scalar starts from 1")]
    NotScalar {
        /// The tensor's shape.
        shape: Shape,
    },
    /// A parameter was read before a store gave it a value.
    #[error(
        "parameter '{name}' has no value yet: attach the model to a store (ferrospeed::initialize does) before running it"
    )]
    Unattached {
        /// The parameter's name.
        name: String,
    },
    /// A parameter was attached to a second store.
    #[error("parameter '{name}' already belongs to a store")]
    AlreadyAttached {
        /// The parameter's name.
        name: String,
    },
    /// Memory could not be had.
    #[error("cannot allocate {bytes} bytes for {category}: {held}")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
        /// What for.
        category: &'static str,
        /// What is held now, by category.
        held: String,
    },
    /// A parameter store failed: the message is the store's own.
    #[error("parameter '{name}': {source}")]
    Store {
        /// The parameter's name.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A device's own library or driver refused.
    #[error("{op} ({device}): {what}")]
    Device {
        /// What was asked of it.
        op: &'static str,
        /// The device.
        device: String,
        /// Its words.
        what: String,
    },
    /// A kernel was to write where others can read.
    #[error(
        "{tensor} is seen through another handle, so no kernel may write to it: write to a tensor of its own, or drop the others first"
    )]
    SharedOutput {
        /// The tensor.
        tensor: String,
    },
    /// The backend cannot do this.
    #[error("{op} is not available on {device}: {why}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
        /// Why not.
        why: String,
    },
}

/// The result of everything here.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;

impl TensorError {
    /// A [`TensorError::BadArgument`].
    pub fn argument(op: &'static str, what: impl Into<String>) -> Self {
        TensorError::BadArgument { op, what: what.into() }
    }

    /// A [`TensorError::BadShape`].
    pub fn shape(op: &'static str, what: &'static str, shape: Shape, expected: impl Into<String>) -> Self {
        TensorError::BadShape { op, what, shape, expected: expected.into() }
    }
}
