//! `ferrospeed._ferrospeed`: what the Python package `ferrospeed` needs of this engine.
//!
//! A torch module is a list of parameters: names, shapes, first values. The engine keeps them, torch sees views of their memory
//! ([`views`]) and hands over gradients as its autograd makes them ([`engine`]). All that has to do with modules, hooks and
//! signatures is Python's, in `ferrospeed/*.py`; nothing here knows torch. No lock of Python's is held while anything here
//! waits for other ranks, a disk or a step.

mod access;
mod checkpoint;
mod engine;
mod errors;
mod memory;
mod source;
mod views;
mod waiting;
mod world;

use pyo3::prelude::*;

/// What the package needs of this engine.
#[pymodule]
fn _ferrospeed(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Warnings of the engine, on the error output; somebody else may have a subscriber already.
    let level = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let _ = tracing_subscriber::fmt()
        .with_env_filter(level)
        .with_writer(std::io::stderr)
        .with_target(false)
        .without_time()
        .try_init();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::add(module)?;
    world::add(module)?;
    access::add(module)?;
    checkpoint::add(module)?;
    module.add_class::<engine::Engine>()
}
