//! Monitors: where a run's curves go.
//!
//! The sections `tensorboard`, `csv_monitor` and `wandb` of a configuration make them; a program adds its own with
//! [`Engine::add_monitor`](crate::Engine::add_monitor), and values of its own with [`Engine::monitor`](crate::Engine::monitor).
//!
//! ```
//! use ferrospeed::monitor::{CsvMonitor, Monitor, ObserveError};
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{DType, Setup, Tensor, World, initialize, ops};
//! use std::sync::{Arc, Mutex};
//!
//! /// Keeps every value in memory.
//! struct Kept(Arc<Mutex<Vec<(String, f64)>>>);
//!
//! impl Monitor for Kept {
//!     fn write(&mut self, tag: &str, value: f64, _step: u64) -> Result<(), ObserveError> {
//!         self.0.lock().expect("nobody else writes").push((tag.to_owned(), value));
//!         Ok(())
//!     }
//!     fn flush(&mut self) -> Result<(), ObserveError> {
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (mut engine, layer) = initialize(&setup, |init| Linear::new(init, 4, 1, true))?;
//! let (kept, folder) = (Arc::new(Mutex::new(Vec::new())), tempfile::tempdir()?);
//! engine.add_monitor(|| Ok(Kept(kept.clone())))?;
//! engine.add_monitor(|| CsvMonitor::create(folder.path(), "job"))?;
//! let x = Tensor::full([8, 4], 1.0, DType::F32, engine.device())?;
//! let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! engine.monitor("Mine/answer", 42.0);
//! assert!(kept.lock().expect("it is whole").iter().any(|(tag, _)| tag == "Train/Samples/train_loss"));
//! assert!(folder.path().join("job/Train_Samples_lr.csv").exists());
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_comm::{print_what_was_asked_for, tell};
pub use ferrospeed_observe::ObserveError;
pub use ferrospeed_observe::monitor::{
    CsvMonitor, Event, Monitor, Monitors, TensorBoard, WandbOffline, WandbRun, read_events,
};
