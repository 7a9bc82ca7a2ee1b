//! Training a model in stages: each rank holds some of the layers, and micro-batches pass through them.
//!
//! All ranks build all of the model's handles and give values only to those of their stage; the ranks that hold the same
//! stage share its state as ZeRO says, and [`Engine::train_batch`] runs a whole step (`batch`), with messages between
//! stages (`messages`). A weight that two stages use is held by both: their gradients are summed, and one of them speaks
//! for it in norms and checkpoints. Stages 2 and 3 of ZeRO are refused: they reduce or gather while micro-batches overlap.

mod batch;
mod messages;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::ops::Range;

use ferrospeed_comm::{Group, Mesh, ProcessTopology, World};
use ferrospeed_config::Stage;
use ferrospeed_nn::{Layer, Parameters, Stages};
use ferrospeed_pipeline::partition::{LayerSize, Method, part};
use ferrospeed_tensor::Param;
use ferrospeed_zero::{Elsewhere, Sharding};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::parts::{Held, Parts};
use crate::setup::{Options, Setup, initialize_model};
use messages::Messenger;
pub use messages::StageFailure;

/// Why a step of a pipeline cannot be taken in parts.
pub(crate) const REFUSAL: &str =
    "this rank holds one stage of the model, whose micro-batches overlap: call train_batch or eval_batch";

/// What a rank with one stage knows of the others.
pub(crate) struct Pipeline {
    /// The ranks of its pipeline, by stage.
    pub(crate) stages: Group,
    /// Its layers.
    layers: Range<usize>,
    messenger: Messenger,
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
    let boundaries = divide(&setup.config.pipeline.partition, &layers, stages)?;
    if let Some(empty) = (0..stages.get()).find(|stage| part(&boundaries, *stage).is_empty()) {
        return refuse(format!(
            "stage {empty} of {stages} gets none of {} layers: use fewer stages, or another pipeline.partition",
            layers.len()
        ));
    }
    let mesh =
        Mesh::new(setup.world.clone(), ProcessTopology::pipe_data(stages.get(), ranks / stages.get())?)?;
    let stage = mesh.coordinate("pipe");
    let uses = uses(&layers, &boundaries);
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
    engine.pipeline = Some(Pipeline {
        layers: part(&boundaries, stage),
        messenger: Messenger::new(pipe.clone()),
        stages: pipe,
    });
    Ok(engine)
}

/// The boundaries of stages among layers. DeepSpeed's default `best` divides by parameters here.
fn divide(method: &str, layers: &[Layer], stages: NonZeroUsize) -> Result<Vec<usize>> {
    let method: Method = if method == "best" { "parameters" } else { method }.parse()?;
    let size = |layer: &Layer| LayerSize {
        class: layer.class.clone(),
        parameters: layer.parameters.iter().filter(|param| param.is_trainable()).map(Param::numel).sum(),
    };
    let sizes: Vec<LayerSize> = layers.iter().map(size).collect();
    Ok(method.divide(&sizes, stages)?)
}

/// The stages that use each parameter, ascending, by its number.
fn uses(layers: &[Layer], boundaries: &[usize]) -> HashMap<u64, Vec<usize>> {
    let mut uses: HashMap<u64, Vec<usize>> = HashMap::new();
    for stage in 0..boundaries.len() - 1 {
        for param in layers[part(boundaries, stage)].iter().flat_map(|layer| &layer.parameters) {
            let stages = uses.entry(param.id()).or_default();
            if stages.last() != Some(&stage) {
                stages.push(stage);
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
        if let Some(group) = tie_group(mesh.world(), mesh, stages)? {
            ties.push(Elsewhere { params, sharding: Sharding::over(&mesh.data()?).tied_to(&group) });
        }
    }
    Ok(ties)
}

/// The group of this rank's pipeline among some stages; `None` on other stages.
fn tie_group(world: &World, mesh: &Mesh, stages: &[usize]) -> Result<Option<Group>> {
    let mut own = None;
    for data in 0..mesh.size("data") {
        let rank = |stage: &usize| mesh.topology().rank(&[("pipe", *stage), ("data", data)]);
        let ranks: Vec<usize> = stages.iter().map(rank).collect::<Result<_, _>>()?;
        let group = world.named_group(&ranks, Some(&format!("tied {ranks:?}")))?;
        own = own.or(group);
    }
    Ok(own)
}

impl Engine {
    /// The stage of the model that this rank holds, and how many there are.
    pub fn stage(&self) -> (usize, usize) {
        self.pipeline.as_ref().map_or((0, 1), |pipeline| (pipeline.stages.rank(), pipeline.stages.size()))
    }
}
