//! [`Engine::save_checkpoint`], and the same in the background.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, PipelineFiles, Spelling, export_deepspeed, export_pipeline, export_universal,
};
use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Contents, Disk, Dtype, FileSystem, GroupState, Kind, Origin, PieceSpec,
    Retention, Target, TrainingState, agree, save,
};
use ferrospeed_comm::Group;
use ferrospeed_config::TagValidation;
use ferrospeed_zero::SavedPiece;
use serde_json::Value;

use super::snapshot::Snapshot;
use super::{kind_of, part_of, stored_type};
use crate::compression::Compressing;
use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// Whose files a save writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Ours: any number of ranks, any layout, checksums.
    #[default]
    Ferrospeed,
    /// DeepSpeed's for this number of ranks and this ZeRO stage, which must be 1, 2 or 3; that of pipelines 0 or 1.
    DeepSpeed,
    /// DeepSpeed's universal ones, under `TAG_universal`.
    Universal,
}

/// How to save.
#[derive(Clone)]
pub struct SaveOptions {
    /// The checkpoint's name. Default: `global_step` and the number of steps.
    pub tag: Option<String>,
    /// What the caller wants back from a load.
    pub client_state: Value,
    /// Whether `latest` shall name this checkpoint.
    pub save_latest: bool,
    /// Whether parameters that are not trained are left out: a load then needs `load_module_strict: false`.
    pub exclude_frozen_parameters: bool,
    /// Samples that the data loader has given out. Default: those that all ranks trained on.
    pub data_position: Option<u64>,
    /// Which older checkpoints stay; those of other formats all do.
    pub retention: Retention,
    /// Whose files are written. Others than ours are made from ours, so that the folder needs room for both for a while.
    pub format: Format,
    /// By which names DeepSpeed's files call parameters.
    pub spelling: Spelling,
    /// The disk; tests put another one here.
    pub fs: Arc<dyn FileSystem>,
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions {
            tag: None,
            client_state: Value::Null,
            save_latest: true,
            exclude_frozen_parameters: false,
            data_position: None,
            retention: Retention::default(),
            spelling: Spelling::default(),
            format: Format::default(),
            fs: Arc::new(Disk),
        }
    }
}

/// A save that runs while training goes on.
#[derive(Default)]
pub(crate) struct Background {
    /// Its own lane to the other ranks, so that its messages do not meet those of training.
    group: Option<Group>,
    running: Option<JoinHandle<Result<PathBuf, CheckpointError>>>,
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(running) = self.running.take()
            && let Ok(Err(error)) = running.join()
        {
            tracing::error!("the last checkpoint was not saved: {error}");
        }
    }
}

/// What a rank is about to write.
struct Draft {
    tag: String,
    pieces: Vec<SavedPiece>,
    /// What follows the pieces: copies of what is this rank's alone.
    own: Vec<Vec<f32>>,
    specs: Vec<PieceSpec>,
    contents: Contents,
}

impl Engine {
    /// Writes a checkpoint into the folder `dir` and returns its path. All ranks call it together, between steps.
    ///
    /// It is whole or absent, whenever a rank dies: see [`ferrospeed_checkpoint::save()`].
    pub fn save_checkpoint(&mut self, dir: impl AsRef<Path>, options: &SaveOptions) -> Result<PathBuf> {
        let dir = dir.as_ref();
        self.finish_checkpoint()?;
        if options.format != Format::Ferrospeed {
            return self.save_foreign(dir, options);
        }
        let draft = self.draft(options)?;
        let held = self.store.hold(&draft.pieces)?;
        let mut bytes = |piece: usize, range: Range<u64>, out: &mut Vec<u8>| {
            let range = range.start as usize..range.end as usize;
            match piece.checked_sub(draft.pieces.len()) {
                Some(own) => append(&draft.own[own][range], out),
                None => held.read(piece, range, out).map_err(|error| error.to_string())?,
            }
            Ok(())
        };
        let target = target(dir, &draft.tag, options);
        Ok(save(&self.world.group(), &target, draft.contents, &draft.specs, &mut bytes)?)
    }

    /// Saves in our format beside, and lets rank 0 write the other one from that.
    fn save_foreign(&mut self, dir: &Path, options: &SaveOptions) -> Result<PathBuf> {
        let stage = self.store.stage() as u8;
        if options.format == Format::DeepSpeed && stage == 0 && self.pipeline.is_none() {
            let why =
                "DeepSpeed's layout without ZeRO is not written; use stage 1, 2 or 3, or Format::Universal";
            return Err(EngineError::Argument { what: "checkpoint format", why: why.into() });
        }
        let beside = dir.join(".in-our-format");
        let own =
            SaveOptions { format: Format::Ferrospeed, retention: Retention::default(), ..options.clone() };
        let saved = self.save_checkpoint(&beside, &own)?;
        let group = self.world.group();
        let ranks = self.world.size() as u64;
        let write = || -> Result<PathBuf, CheckpointError> {
            let checkpoint = Checkpoint::open(&saved)?;
            let path = match (options.format, self.numbered_layers(&checkpoint)) {
                (Format::Universal, _) => export_universal(&checkpoint, dir, options.spelling)?,
                (_, Some(boundaries)) => {
                    let ranks = self.data_parallel_size as u64;
                    let slices = self.slices.as_ref().map_or(1, Group::size) as u64;
                    let files = PipelineFiles {
                        boundaries: &boundaries,
                        ranks,
                        slices,
                        tied: &[],
                        zero_stage: stage,
                    };
                    export_pipeline(&checkpoint, dir, files)?;
                    dir.join(&checkpoint.manifest().tag)
                }
                (_, None) => {
                    let (expert_ranks, spelling) = (self.expert_ranks as u64, options.spelling);
                    let options = ExportOptions { stage, ranks, expert_ranks, spelling };
                    export_deepspeed(&checkpoint, dir, options)?;
                    dir.join(&checkpoint.manifest().tag)
                }
            };
            Ok(path)
        };
        let written = if self.world.rank() == 0 { write() } else { Ok(PathBuf::new()) };
        // Of what could not be written nothing is left either.
        if self.world.rank() == 0
            && let Err(error) = std::fs::remove_dir_all(&beside)
        {
            tracing::warn!("{}: cannot remove the copy in our format: {error}", beside.display());
        }
        Ok(agree(&group, written)?.swap_remove(0))
    }

    /// As [`Engine::save_checkpoint`], but returns at once. Files are written while training goes on: straight from the
    /// state while forward and backward run, which do not change it, and from a copy of the rest once a step would. One
    /// save runs at a time: a second waits for the first, so at most one copy of the state exists.
    /// [`Engine::finish_checkpoint`] says how it went.
    pub fn save_checkpoint_in_background(
        &mut self,
        dir: impl AsRef<Path>,
        options: &SaveOptions,
    ) -> Result<()> {
        let dir = dir.as_ref();
        self.finish_checkpoint()?;
        if options.format != Format::Ferrospeed {
            let why = "only our own format is written in the background".to_owned();
            return Err(EngineError::Argument { what: "checkpoint format", why });
        }
        let draft = self.draft(options)?;
        let held = self.store.hold(&draft.pieces)?;
        let is_host = self.device().backend().is_host();
        let group = match &self.background.group {
            Some(group) => group.clone(),
            None => {
                let everyone: Vec<usize> = (0..self.world.size()).collect();
                let made = self.world.named_group(&everyone, Some("checkpoint"))?;
                let group = made.unwrap_or_else(|| self.world.group());
                self.background.group = Some(group.clone());
                group
            }
        };
        let (dir, options) = (dir.to_path_buf(), options.clone());
        let running = std::thread::Builder::new().name("checkpoint".into()).spawn(move || {
            let pieces = draft.pieces.len();
            let mut snapshot = Snapshot::new(held, draft.pieces, is_host);
            let mut bytes = |piece: usize, range: Range<u64>, out: &mut Vec<u8>| {
                let range = range.start as usize..range.end as usize;
                match piece.checked_sub(pieces) {
                    Some(own) => append(&draft.own[own][range], out),
                    None => snapshot.read(piece, range, out)?,
                }
                Ok(())
            };
            save(&group, &target(&dir, &draft.tag, &options), draft.contents, &draft.specs, &mut bytes)
        });
        let failed =
            |error: std::io::Error| EngineError::Argument { what: "background save", why: error.to_string() };
        self.background.running = Some(running.map_err(failed)?);
        Ok(())
    }

    /// Waits for the save in the background, if one runs, and returns its path.
    pub fn finish_checkpoint(&mut self) -> Result<Option<PathBuf>> {
        let Some(running) = self.background.running.take() else { return Ok(None) };
        match running.join() {
            Ok(saved) => Ok(Some(saved?)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Whether a save runs in the background.
    pub fn is_saving(&self) -> bool {
        self.background.running.as_ref().is_some_and(|running| !running.is_finished())
    }

    fn draft(&self, options: &SaveOptions) -> Result<Draft> {
        self.check_whole("save_checkpoint")?;
        if self.store.has_gradients() {
            return Err(EngineError::Order {
                call: "save_checkpoint",
                why: "gradients wait for a step and would be lost; save after step() at an accumulation boundary",
            });
        }
        let tag = options.tag.clone().unwrap_or_else(|| format!("global_step{}", self.global_steps));
        self.validate_tag(&tag)?;
        let mut pieces = self.store.pieces_to_write();
        pieces.retain(|piece| piece.trained || !options.exclude_frozen_parameters);
        let specs = pieces.iter().map(|piece| {
            let param = &self.store.params()[piece.param];
            let place = self.parts.as_ref().and_then(|parts| parts.place(param.name()));
            PieceSpec {
                name: param.name().to_owned(),
                kind: kind_of(piece),
                shape: param.whole_shape().sizes().iter().map(|size| *size as u64).collect(),
                dtype: stored_type(piece.dtype),
                place: place.unwrap_or(piece.param) as u64,
                part: part_of(param),
                start: piece.start as u64,
                len: piece.len as u64,
            }
        });
        let mut specs: Vec<PieceSpec> = specs.collect();
        let (names, own): (Vec<String>, Vec<Vec<f32>>) = self.store.own_numbers()?.into_iter().unzip();
        let behind = self.store.params().len() as u64;
        specs.extend(names.into_iter().zip(&own).map(|(name, values)| PieceSpec {
            name,
            kind: Kind::Rank(self.world.rank()),
            shape: vec![values.len() as u64],
            dtype: Dtype::F32,
            place: behind,
            part: None,
            start: 0,
            len: values.len() as u64,
        }));
        Ok(Draft { tag, specs, pieces, own, contents: self.contents(options) })
    }

    /// Compares the tag over ranks, as `checkpoint.tag_validation` asks. Rank 0's is used.
    fn validate_tag(&self, tag: &str) -> Result<()> {
        if self.config.checkpoint.tag_validation == TagValidation::Ignore || self.world.size() == 1 {
            return Ok(());
        }
        let tags = agree(&self.world.group(), Ok(tag.to_owned()))?;
        let Some(other) = tags.iter().position(|other| *other != tags[0]) else { return Ok(()) };
        let why = format!(
            "the tag is not consistent across all ranks: '{}' on rank 0, '{}' on rank {other}",
            tags[0], tags[other]
        );
        if self.config.checkpoint.tag_validation == TagValidation::Fail {
            return Err(EngineError::Argument { what: "checkpoint tag", why });
        }
        if self.world.rank() == 0 {
            tracing::warn!("{why}; rank 0's is used");
        }
        Ok(())
    }

    fn contents(&self, options: &SaveOptions) -> Contents {
        let group = |(options, params): (ferrospeed_optim::GroupOptions, Vec<usize>)| GroupState {
            params: params.iter().map(|&param| self.store.params()[param].name().to_owned()).collect(),
            lr: options.lr,
            weight_decay: options.weight_decay,
            betas: options.betas,
        };
        let members = self.store.group_members();
        let json = |value: Result<Value, serde_json::Error>| value.ok();
        Contents {
            origin: Origin {
                ranks: self.world.size(),
                stage: self.store.stage() as u8,
                dtype: stored_type(self.store.dtype()),
                optimizer: self.store.optimizer().map(|optimizer| optimizer.name().to_owned()),
                kernels: Some(self.device().backend().kernels()),
            },
            training: TrainingState {
                global_steps: self.global_steps,
                global_samples: self.global_samples,
                skipped_steps: self.skipped_steps,
                skipped_in_a_row: self.skipped_in_a_row,
                micro_steps: self.micro_steps,
                optimizer_steps: self.store.optimizer_steps(),
                last_grad_norm: self.last_grad_norm,
                seed: Some(self.seed),
                data_position: options.data_position.unwrap_or(self.global_samples),
                groups: match &self.parts {
                    Some(parts) => parts.saved_groups(&self.store.group_options()),
                    None => self.store.group_options().into_iter().zip(members).map(group).collect(),
                },
                scheduler: self.scheduler.as_ref().and_then(|own| json(serde_json::to_value(own.state()))),
                loss_scaler: json(serde_json::to_value(self.scaler.state())),
                per_parameter: self.store.per_parameter(),
                masks: self.compressing.as_ref().map(Compressing::saved).unwrap_or_default(),
                layer_states: self
                    .states
                    .iter()
                    .map(|(name, state)| (name.clone(), state.values()))
                    .collect(),
            },
            client_state: options.client_state.clone(),
            config: self.config.to_json(),
            aliases: self.aliases.clone(),
        }
    }
}

fn append(values: &[f32], out: &mut Vec<u8>) {
    values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
}

fn target<'a>(dir: &'a Path, tag: &'a str, options: &'a SaveOptions) -> Target<'a> {
    Target { dir, tag, update_latest: options.save_latest, retention: options.retention, fs: &*options.fs }
}
