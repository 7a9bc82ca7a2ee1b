//! Checkpoints: whole or absent, on any number of ranks, ours and DeepSpeed's.
//!
//! [`Engine::save_checkpoint`](crate::Engine::save_checkpoint) and [`Engine::load_checkpoint`](crate::Engine::load_checkpoint)
//! keep all that a run needs to go on to the same bits; [`SaveOptions`] says whose files are written. The functions here look
//! into checkpoints without an engine: [`get_fp32_state_dict_from_zero_checkpoint`] and
//! [`convert_zero_checkpoint_to_fp32_state_dict`] give weights in f32, [`export_universal`] writes DeepSpeed's universal form.
//!
//! ```
//! use ferrospeed::checkpoint::get_fp32_state_dict_from_zero_checkpoint;
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{LoadOptions, SaveOptions, Setup, World, initialize};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (mut engine, _layer) = initialize(&setup, |init| Linear::new(&init.at("head"), 4, 2, true))?;
//! let folder = tempfile::tempdir()?;
//! engine.save_checkpoint(folder.path(), &SaveOptions { tag: Some("first".into()), ..SaveOptions::default() })?;
//!
//! let weights = get_fp32_state_dict_from_zero_checkpoint(folder.path(), None)?;
//! assert_eq!((weights[0].name.as_str(), &weights[0].shape[..]), ("head.weight", &[2, 4][..]));
//! let loaded = engine.load_checkpoint(folder.path(), &LoadOptions::default())?;
//! assert_eq!(loaded.tag, "first");
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, export_deepspeed, export_universal, import_deepspeed, import_universal,
};
pub use ferrospeed_checkpoint::weights::{
    Fp32Weight, convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint,
};
pub use ferrospeed_checkpoint::{Checkpoint, CheckpointError, Retention, list};
pub use ferrospeed_engine::{FindParameter, Format, LoadOptions, Loaded, SaveOptions, Spelling};
