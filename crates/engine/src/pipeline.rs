//! Training a model in stages: each rank holds some of the layers, and micro-batches pass through them.
//!
//! All ranks build all of the model's handles and give values only to those of their stage; the ranks that hold the same
//! stage share its state as ZeRO says, and [`Engine::train_batch`] runs a whole step (`batch`): it follows a schedule
//! (`follow`), with messages between stages (`messages`). A stage has one chunk of consecutive layers, or several, as the
//! schedule says. A weight that two stages use is held by both: their gradients are summed, and one of them speaks
//! for it in norms and checkpoints. Stages 2 and 3 of ZeRO are refused: they reduce or gather while micro-batches overlap.

mod batch;
mod follow;
mod measure;
mod messages;
mod spread;

use std::num::NonZeroUsize;

use ferrospeed_checkpoint::Checkpoint;
use ferrospeed_comm::topology::PIPE;
use ferrospeed_comm::{Group, Mesh, ProcessTopology};
use ferrospeed_config::{Config, PipelineStages, Stage};
use ferrospeed_nn::{Init, Layer, Parameters, Stages};
use ferrospeed_pipeline::division::{Asked, Division};
use ferrospeed_pipeline::partition::{LayerSize, Measured};
use ferrospeed_tensor::Param;

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::experts;
use crate::profiler::StepProfiler;
use crate::setup::{Options, Setup, configured_optimizer, initialize_part, sets_of};
pub use batch::{EvalOptions, Evaluation, Reduce};
pub use follow::StageTimes;
pub use measure::measure_layers;
use messages::Messenger;
pub use messages::{Passed, StageFailure};
use spread::{Spread, stage_group};

/// Why a step of a pipeline cannot be taken in parts.
pub(crate) const REFUSAL: &str =
    "this rank holds one stage of the model, whose micro-batches overlap: call train_batch or eval_batch";

/// What a rank with one stage knows of the others.
pub(crate) struct Pipeline {
    /// The ranks of its pipeline, by stage.
    pub(crate) stages: Group,
    /// Who has which layers.
    division: Division,
    /// How many layers at a time are computed again in backward; none where it is 0.
    recomputed_layers: usize,
    messenger: Messenger,
    times: StageTimes,
}

/// Makes an engine for a model in `stages` stages. All ranks call it together, with all of the model's `parameters`.
/// `setup.config` is resolved for the ranks that see different data.
///
/// Where layers are in slices too, sequences are shared or experts are spread, ranks lie on a mesh whose first axis has the
/// stages, and `options` were told of it ([`Options::spread_over`], [`Options::spread_experts`]). Without, the ranks of a
/// stage are neighbours, as in DeepSpeed, and see different data.
pub fn initialize_pipeline<M: Stages>(
    setup: &Setup,
    stages: NonZeroUsize,
    model: &M,
    parameters: &Parameters,
    mut options: Options<'_>,
) -> Result<Engine> {
    let refuse = |why: String| Err(EngineError::Argument { what: "pipeline.stages", why });
    let ranks = setup.world.size();
    if !ranks.is_multiple_of(stages.get()) {
        return refuse(format!(
            "{ranks} ranks cannot be divided over {stages} stages: use a multiple of the stages as ranks"
        ));
    }
    if setup.config.zero.stage > Stage::OptimizerStates {
        let why = format!(
            "stage {} cannot be combined with pipeline stages: use 0 or 1, which divides optimizer states alike",
            setup.config.zero.stage.number()
        );
        return Err(EngineError::Unsupported { key: "zero_optimization.stage", why });
    }
    if options.groups.is_some() || (options.sharding.is_some() && options.mesh.is_none()) {
        return refuse(
            "a model in stages has one group of options, and its stages decide the sharding".into(),
        );
    }
    let division = divide(&setup.config, stages, model, options.measured.as_deref())?;
    if setup.world.rank() == 0 {
        tracing::info!("stages: {division}");
    }
    let mesh = match &options.mesh {
        Some(mesh) if mesh.size(PIPE) == stages.get() => mesh.clone(),
        Some(mesh) => {
            return refuse(format!(
                "the mesh has {} on its axis {PIPE}, and there are {stages} stages",
                mesh.size(PIPE)
            ));
        }
        None => {
            let topology = ProcessTopology::pipe_data(stages.get(), ranks / stages.get())?;
            let mesh = Mesh::new(setup.world.clone(), topology)?;
            options.spread_over(&mesh)?;
            mesh
        }
    };
    let spread = Spread::of(&mesh, parameters, &model.layers(), &division)?;
    options.elsewhere = spread.ties(&mesh, parameters, options.sharding.as_ref())?;
    options.agreement = Some(setup.world.group());
    options.reduces_at_step = true;
    experts::check(&setup.config, parameters)?;
    let configured = configured_optimizer(&setup.config)?;
    let rule = options.optimizer.as_ref().or(configured.as_ref()).map(|(rule, _)| rule);
    let groups = sets_of(parameters, rule, options.spares_vectors);
    let mut engine = initialize_part(setup, &spread.own, options)?;
    engine.aliases = parameters.aliases().clone();
    engine.states = parameters.states().clone();
    let pipe = mesh.pipe()?;
    let of_experts = engine.parts.take();
    engine.parts = Some(spread.parts(parameters, &groups, &pipe, of_experts));
    let Some(gradients) = stage_group(&mesh, &[PIPE], &Vec::from_iter(0..stages.get()), "gradients")? else {
        return refuse("this rank has none of the stages".into());
    };
    if pipe.ranks().contains(&0) {
        engine.profiler = StepProfiler::of_stage(&setup.config);
    }
    let placement = division.stage_of_chunk.clone();
    let mut messenger = Messenger::new([pipe.clone(), gradients], placement, &setup.device);
    if let (true, Some(slices)) = (model.carries_alike(), &engine.slices) {
        let config = &setup.config.pipeline;
        messenger.cut_over(slices, [config.pipe_partitioned, config.grad_partitioned]);
    }
    engine.pipeline = Some(Pipeline {
        messenger,
        stages: pipe,
        division,
        recomputed_layers: usize::try_from(setup.config.pipeline.activation_checkpoint_interval)
            .unwrap_or(usize::MAX),
        times: StageTimes::default(),
    });
    Ok(engine)
}

/// The same of a model that is built here, in as many stages as `pipeline.stages` says: all ranks where it says nothing.
pub fn initialize_stages<M: Stages>(
    setup: &Setup,
    options: Options<'_>,
    build: impl FnOnce(&Init) -> M,
) -> Result<(Engine, M)> {
    let ranks = setup.world.size() as u64;
    let stages = match setup.config.pipeline.stages {
        PipelineStages::Fixed(stages) => stages,
        PipelineStages::Auto => ranks,
    };
    let stages = usize::try_from(stages).ok().and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN);
    let init = Init::root();
    let model = build(&init);
    let engine = initialize_pipeline(setup, stages, &model, &init.parameters(), options)?;
    Ok((engine, model))
}

/// Whether a configuration asks for a division by what layers take, which someone has to measure first.
pub fn divides_by_measure(config: &Config) -> bool {
    asked_of(config, NonZeroUsize::MIN).method().is_ok_and(|method| method.needs_measuring())
}

/// What a configuration says of the division of a model into `stages`.
fn asked_of(config: &Config, stages: NonZeroUsize) -> Asked<'_> {
    let micro_batches = config.batch.gradient_accumulation_steps.get();
    Asked {
        stages,
        partition: &config.pipeline.partition,
        schedule: &config.pipeline.schedule,
        micro_batches: usize::try_from(micro_batches).unwrap_or(usize::MAX),
    }
}

/// Which stage gets which layers of a model, if it can be divided so: as [`initialize_pipeline`] divides it. `measured` is
/// what [`measure_layers`] found, where the configuration asks for a division by that.
pub fn divide<M: Stages>(
    config: &Config,
    stages: NonZeroUsize,
    model: &M,
    measured: Option<&[Measured]>,
) -> Result<Division> {
    let (layers, asked) = (model.layers(), asked_of(config, stages));
    let ends_meet = asked.ends_meet();
    let size = |(index, layer): (usize, &Layer)| {
        // The stage that has both ends has once what is tied between them.
        let is_there = |param: &Param| {
            let first = layers[0].parameters.iter().any(|known| known.is_same(param));
            ends_meet && index + 1 == layers.len() && first
        };
        let trained = layer.parameters.iter().filter(|param| param.is_trainable() && !is_there(param));
        // Slices count as the wholes they are of, so that a division does not depend on them.
        let parameters = trained.map(|param| param.whole_shape().numel()).sum();
        let measured = measured.and_then(|measured| measured.get(index)).copied();
        LayerSize { class: layer.class.clone(), parameters, measured }
    };
    let sizes: Vec<LayerSize> = layers.iter().enumerate().map(size).collect();
    Ok(Division::of(&asked, &sizes)?)
}

impl Engine {
    /// Where stages begin and end, for a checkpoint whose names begin with numbers of layers: what DeepSpeed has files for.
    pub(crate) fn numbered_layers(&self, checkpoint: &Checkpoint) -> Option<Vec<u64>> {
        let is_numbered =
            |name: &str| name.split_once('.').is_some_and(|(layer, _)| layer.parse::<u64>().is_ok());
        let pipeline = self.pipeline.as_ref()?;
        let boundaries = &pipeline.division.boundaries;
        let in_order = boundaries.len() == pipeline.stages.size() + 1;
        let numbered = checkpoint.manifest().tensors.iter().all(|tensor| is_numbered(&tensor.name));
        (in_order && numbered).then(|| boundaries.iter().map(|layer| *layer as u64).collect())
    }

    /// Which stage has which layers, where the model is in stages.
    pub fn division(&self) -> Option<&Division> {
        self.pipeline.as_ref().map(|pipeline| &pipeline.division)
    }

    /// The stage of the model that this rank holds, and how many there are.
    pub fn stage(&self) -> (usize, usize) {
        self.pipeline.as_ref().map_or((0, 1), |pipeline| (pipeline.stages.rank(), pipeline.stages.size()))
    }
}
