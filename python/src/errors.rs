//! Errors as Python's exceptions: a base, and one class each for what a program may want to tell apart.

use ferrospeed_comm::Error as CommFailure;
use ferrospeed_config::ConfigError as ConfigFailure;
use ferrospeed_engine::{EngineError, Failure};
use ferrospeed_zero::ZeroError;
use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(ferrospeed, FerrospeedError, PyRuntimeError, "What this engine refuses or cannot do.");
create_exception!(
    ferrospeed,
    ConfigError,
    FerrospeedError,
    "A ds_config that is wrong: every mistake is in the message."
);
create_exception!(
    ferrospeed,
    CommError,
    FerrospeedError,
    "Ranks that could not talk: one was lost, late, or did something else."
);
create_exception!(
    ferrospeed,
    CheckpointError,
    FerrospeedError,
    "A checkpoint that could not be saved or loaded."
);

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("FerrospeedError", py.get_type::<FerrospeedError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())?;
    module.add("CommError", py.get_type::<CommError>())?;
    module.add("CheckpointError", py.get_type::<CheckpointError>())
}

/// Something that was asked for and makes no sense.
pub(crate) fn refused(why: impl Into<String>) -> PyErr {
    FerrospeedError::new_err(why.into())
}

/// Ranks that could not talk.
pub(crate) fn of_comm(error: CommFailure) -> PyErr {
    CommError::new_err(Failure::from(error).to_string())
}

/// A configuration that is wrong.
pub(crate) fn of_config(error: ConfigFailure) -> PyErr {
    ConfigError::new_err(Failure::from(error).to_string())
}

/// What the store refuses.
pub(crate) fn of_store(error: ZeroError) -> PyErr {
    of_engine(EngineError::Zero(error))
}

/// What a tensor or its store refuses.
pub(crate) fn of_tensor(error: ferrospeed_tensor::TensorError) -> PyErr {
    of_engine(EngineError::Tensor(error))
}

/// What the engine refuses.
pub(crate) fn of_engine(error: EngineError) -> PyErr {
    let talked = is_of_comm(&error);
    let class = match error {
        _ if talked => CommError::new_err::<String>,
        EngineError::Config(_) => ConfigError::new_err::<String>,
        EngineError::Checkpoint(_) => CheckpointError::new_err::<String>,
        _ => FerrospeedError::new_err::<String>,
    };
    class(Failure::from(error).to_string())
}

/// Whether ranks could not talk, at whatever depth that happened.
fn is_of_comm(error: &EngineError) -> bool {
    use std::error::Error;
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        // What is transparent has its cause's cause as its own.
        let inner: &(dyn Error + 'static) = match error.downcast_ref::<EngineError>() {
            Some(EngineError::Comm(inner)) => inner,
            Some(EngineError::Zero(inner)) => inner,
            Some(EngineError::Collective(inner)) => inner,
            Some(EngineError::Tensor(inner)) => inner,
            Some(EngineError::Stage { source, .. }) => return is_of_comm(source),
            _ => error,
        };
        let is_comm = inner.is::<CommFailure>()
            || matches!(inner.downcast_ref::<ZeroError>(), Some(ZeroError::Comm(_)));
        if is_comm {
            return true;
        }
        cause = inner.source();
    }
    false
}
