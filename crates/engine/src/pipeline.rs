//! Training a model in stages: each rank holds some of the layers, and micro-batches pass through them.
//!
//! All ranks build all of the model's handles and give values only to those of their stage; the ranks that hold the same
//! stage share its state as ZeRO says, and [`Engine::train_batch`] runs a whole step (`batch`): it follows a schedule
//! (`follow`), with messages between stages (`messages`). A stage has one chunk of consecutive layers, or several, as the
//! schedule says. A weight that two stages use is held by both: their gradients are summed, and one of them speaks
//! for it in norms and checkpoints. Stages 2 and 3 of ZeRO are refused: they reduce or gather while micro-batches overlap.

mod batch;
mod follow;
mod messages;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;

use ferrospeed_checkpoint::Checkpoint;
use ferrospeed_comm::{Group, Mesh, ProcessTopology};
use ferrospeed_config::{Config, Stage};
use ferrospeed_nn::{Layer, Parameters, Stages};
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::partition::{LayerSize, Method, part};
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use ferrospeed_tensor::Param;
use ferrospeed_zero::{Elsewhere, Sharding};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::parts::{Held, Parts};
use crate::setup::{Options, Setup, initialize_model};
pub use follow::StageTimes;
use messages::Messenger;
pub use messages::StageFailure;

/// Why a step of a pipeline cannot be taken in parts.
pub(crate) const REFUSAL: &str =
    "this rank holds one stage of the model, whose micro-batches overlap: call train_batch or eval_batch";

/// What a rank with one stage knows of the others.
pub(crate) struct Pipeline {
    /// The ranks of its pipeline, by stage.
    pub(crate) stages: Group,
    kind: Kind,
    /// Where the layers of chunks begin and end.
    boundaries: Vec<usize>,
    /// How many layers at a time are computed again in backward; none where it is 0.
    recomputed_layers: usize,
    messenger: Messenger,
    times: StageTimes,
}

/// Makes an engine for a model in `stages` stages. All ranks call it together, with all of the model's `parameters`; the
/// ranks of a stage are neighbours, as in DeepSpeed. `setup.config` is resolved for the ranks that see different data,
/// which are all over the number of stages.
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
    if !options.experts.is_empty() {
        let why = "experts cannot be spread over ranks that hold stages of a model; leave out one of the two";
        return refuse(why.into());
    }
    if options.groups.is_some() || options.sharding.is_some() {
        return refuse(
            "a model in stages has one group of options, and its stages decide the sharding".into(),
        );
    }
    let layers = model.layers();
    let kind = training_schedule(&setup.config, stages)?;
    let placement = kind.placement(stages.get());
    let chunks = NonZeroUsize::new(placement.len()).unwrap_or(stages);
    let boundaries = divide(&setup.config.pipeline.partition, &layers, chunks)?;
    if let Some(empty) = (0..chunks.get()).find(|chunk| part(&boundaries, *chunk).is_empty()) {
        let what = if chunks == stages { "stage" } else { "chunk" };
        return refuse(format!(
            "{what} {empty} of {chunks} gets none of {} layers: use fewer stages, another pipeline.partition, or a \
             pipeline.schedule with fewer chunks",
            layers.len()
        ));
    }
    let mesh =
        Mesh::new(setup.world.clone(), ProcessTopology::pipe_data(stages.get(), ranks / stages.get())?)?;
    let stage = mesh.coordinate("pipe");
    let uses = uses(&layers, &boundaries, &placement);
    let own =
        parameters.partition(|param| uses.get(&param.id()).is_some_and(|stages| stages.contains(&stage))).0;
    if let Some(unused) = parameters.as_slice().iter().find(|param| !uses.contains_key(&param.id())) {
        return refuse(format!("'{}' belongs to no layer, so no stage would hold it", unused.name()));
    }
    options.elsewhere = ties(&mesh, parameters, &uses)?;
    options.sharding = Some(Sharding::over(&mesh.data()?));
    options.agreement = Some(setup.world.group());
    options.data_parallel_size = Some(ranks / stages.get());
    options.reduces_at_step = true;
    let mut engine = initialize_model(setup, &own, options)?;
    engine.aliases = parameters.aliases().clone();
    engine.states = parameters.states().clone();
    let pipe = mesh.pipe()?;
    let held = |(id, stages): (&u64, &Vec<usize>)| (*id, Held { group: pipe.clone(), rank: stages[0] });
    engine.parts = Some(Parts::of(parameters, &[parameters.as_slice()], uses.iter().map(held).collect()));
    let all: Vec<usize> = (0..stages.get()).collect();
    let Some(gradients) = stage_group(&mesh, &all, "gradients")? else {
        return refuse("this rank has none of the stages".into());
    };
    engine.pipeline = Some(Pipeline {
        messenger: Messenger::new([pipe.clone(), gradients], placement),
        stages: pipe,
        kind,
        boundaries,
        recomputed_layers: usize::try_from(setup.config.pipeline.activation_checkpoint_interval)
            .unwrap_or(usize::MAX),
        times: StageTimes::default(),
    });
    Ok(engine)
}

/// The schedule that a configuration names, if a step can follow it.
pub fn training_schedule(config: &Config, stages: NonZeroUsize) -> Result<Kind> {
    let named = &config.pipeline.schedule;
    let refuse = |why: String| EngineError::Argument { what: "pipeline.schedule", why };
    let kind: Kind = named.parse().map_err(|error: PipelineError| refuse(error.to_string()))?;
    if matches!(kind, Kind::Inference | Kind::DataParallel) {
        return Err(refuse(format!(
            "'{named}' does not train a model in stages: use 1f1b, interleaved:CHUNKS, zb-h1 or zb-v"
        )));
    }
    let micro_batches = config.batch.gradient_accumulation_steps.get();
    let micro_batches = usize::try_from(micro_batches).unwrap_or(usize::MAX);
    Schedule::new(kind, stages.get(), micro_batches).map_err(|error| refuse(error.to_string()))?;
    Ok(kind)
}

/// The boundaries of chunks among layers. DeepSpeed's default `best` divides by parameters here.
fn divide(method: &str, layers: &[Layer], chunks: NonZeroUsize) -> Result<Vec<usize>> {
    let method: Method = if method == "best" { "parameters" } else { method }.parse()?;
    let size = |layer: &Layer| LayerSize {
        class: layer.class.clone(),
        parameters: layer.parameters.iter().filter(|param| param.is_trainable()).map(Param::numel).sum(),
    };
    let sizes: Vec<LayerSize> = layers.iter().map(size).collect();
    Ok(method.divide(&sizes, chunks)?)
}

/// The stages that use each parameter, ascending, by its number.
fn uses(layers: &[Layer], boundaries: &[usize], placement: &[usize]) -> HashMap<u64, Vec<usize>> {
    let mut uses: HashMap<u64, Vec<usize>> = HashMap::new();
    for (chunk, stage) in placement.iter().enumerate() {
        for param in layers[part(boundaries, chunk)].iter().flat_map(|layer| &layer.parameters) {
            let stages = uses.entry(param.id()).or_default();
            if let Err(place) = stages.binary_search(stage) {
                stages.insert(place, *stage);
            }
        }
    }
    uses
}

/// How the parameters are spread that this stage shares with others. Collective over the world.
fn ties(mesh: &Mesh, parameters: &Parameters, uses: &HashMap<u64, Vec<usize>>) -> Result<Vec<Elsewhere>> {
    let mut by_stages: BTreeMap<&[usize], Vec<Param>> = BTreeMap::new();
    for param in parameters.as_slice().iter().filter(|param| param.is_trainable()) {
        if let Some(stages) = uses.get(&param.id()).filter(|stages| stages.len() > 1) {
            by_stages.entry(stages).or_default().push(param.clone());
        }
    }
    let mut ties = Vec::new();
    for (stages, params) in by_stages {
        if let Some(group) = stage_group(mesh, stages, "tied")? {
            ties.push(Elsewhere { params, sharding: Sharding::over(&mesh.data()?).tied_to(&group) });
        }
    }
    Ok(ties)
}

/// A new group of this rank's pipeline among some stages; `None` on other stages.
fn stage_group(mesh: &Mesh, stages: &[usize], name: &str) -> Result<Option<Group>> {
    let mut own = None;
    for data in 0..mesh.size("data") {
        let rank = |stage: &usize| mesh.topology().rank(&[("pipe", *stage), ("data", data)]);
        let ranks: Vec<usize> = stages.iter().map(rank).collect::<Result<_, _>>()?;
        let group = mesh.world().named_group(&ranks, Some(&format!("{name} {ranks:?}")))?;
        own = own.or(group);
    }
    Ok(own)
}

impl Engine {
    /// Where stages begin and end, for a checkpoint whose names begin with numbers of layers: what DeepSpeed has files for.
    pub(crate) fn numbered_layers(&self, checkpoint: &Checkpoint) -> Option<Vec<u64>> {
        let is_numbered =
            |name: &str| name.split_once('.').is_some_and(|(layer, _)| layer.parse::<u64>().is_ok());
        let pipeline = self.pipeline.as_ref()?;
        let in_order = pipeline.boundaries.len() == pipeline.stages.size() + 1;
        let numbered = checkpoint.manifest().tensors.iter().all(|tensor| is_numbered(&tensor.name));
        (in_order && numbered).then(|| pipeline.boundaries.iter().map(|layer| *layer as u64).collect())
    }

    /// The stage of the model that this rank holds, and how many there are.
    pub fn stage(&self) -> (usize, usize) {
        self.pipeline.as_ref().map_or((0, 1), |pipeline| (pipeline.stages.rank(), pipeline.stages.size()))
    }
}
