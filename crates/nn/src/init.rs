//! Where parameters are born: named by path, listed in order, without values.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrospeed_tensor::{Initializer, Param, Result, Shape, Slice, Unit};

use crate::adapter::{Adapters, Adapting, Found, part_of};
use crate::tensor_parallel::{Between, Cut, Held, Slices};

/// A place in the tree of modules.
#[derive(Debug, Clone)]
pub struct Init {
    path: String,
    unit: Option<Unit>,
    /// The ranks that hold slices of layers.
    slices: Option<Slices>,
    /// How the layer that is made here is cut.
    cut: Option<Cut>,
    /// Which rank holds what is made here, where ranks hold different experts.
    holder: Option<Holder>,
    /// Which layers have adapters.
    adapting: Option<Arc<Adapting>>,
    /// Why what is made here has none.
    without_adapters: Option<&'static str>,
    registered: Arc<Mutex<Parameters>>,
}

/// Which of `ranks` ranks holds an expert's parameters. All of them know the parameter; the others give it no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Over how many ranks the experts of the layer are spread.
    pub ranks: usize,
    /// The one that holds it.
    pub rank: usize,
}

impl Init {
    /// The root of a new model.
    pub fn root() -> Init {
        Init {
            path: String::new(),
            unit: None,
            slices: None,
            cut: None,
            holder: None,
            adapting: None,
            without_adapters: None,
            registered: Arc::default(),
        }
    }

    /// The same place, whose layers are cut into slices over these ranks where they say how.
    pub fn over(&self, slices: Option<&Slices>) -> Init {
        Init { slices: slices.filter(|slices| slices.group().size() > 1).cloned(), ..self.clone() }
    }

    /// The same place for a layer that is cut this way; changes nothing where there are no ranks to cut for.
    pub fn cut(&self, cut: Cut) -> Init {
        Init { cut: Some(cut), ..self.clone() }
    }

    /// Whether ranks that hold slices of layers have all tokens between them, so that rows of tokens may be summed over ranks.
    pub fn has_all_tokens(&self) -> bool {
        self.slices.as_ref().is_none_or(|slices| slices.between() == Between::AllTokens)
    }

    /// The ranks, and how the layer made here is cut over them.
    pub(crate) fn slicing(&self) -> Option<(&Slices, Cut)> {
        Some((self.slices.as_ref()?, self.cut?))
    }

    /// The place `name` below this one. Dots in `name` go several levels down; an empty name stays here.
    pub fn at(&self, name: impl std::fmt::Display) -> Init {
        let name = name.to_string();
        let path = match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name,
            (_, true) => self.path.clone(),
            _ => format!("{}.{name}", self.path),
        };
        Init { path, ..self.clone() }
    }

    /// Where this is, from the root: dots between names, empty at the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// This place as one unit: all parameters made below it come and go together, whichever of them is read. For a module
    /// of which a router or a condition uses a part, such as the experts of a mixture: ranks that choose differently
    /// still do the same things together. Within a unit this changes nothing.
    pub fn as_unit(&self) -> Init {
        Init { unit: self.unit.or_else(|| Some(Unit::new())), ..self.clone() }
    }

    /// This place, whose parameters one rank of several holds.
    pub fn held_by(&self, holder: Holder) -> Init {
        Init { holder: Some(holder), ..self.clone() }
    }

    /// The same place, whose linear layers have adapters where these say so; all other parameters are frozen, but for those
    /// that are to be trained whole. Refuses numbers and patterns that make none.
    pub fn adapted_by(&self, adapters: &Adapters) -> Result<Init> {
        Ok(Init { adapting: Some(Arc::new(Adapting::new(adapters)?)), ..self.clone() })
    }

    /// The same place for layers that have no adapters; `why` goes on behind a layer's path.
    pub fn without_adapters(&self, why: &'static str) -> Init {
        Init { without_adapters: Some(why), ..self.clone() }
    }

    /// What the adapters of [`Init::adapted_by`] have met in the model made so far.
    pub fn adapters_found(&self) -> Option<Found> {
        self.adapting.as_ref().map(|adapting| adapting.found().clone())
    }

    /// Says that the layer made here is none that can have adapters.
    pub(crate) fn refuse_adapters(&self, why: &'static str) {
        if let Some(adapting) = &self.adapting {
            adapting.refuse(&self.path, self.without_adapters.unwrap_or(why));
        }
    }

    /// The rank and the factor of the adapter of the linear layer made here, where it has one.
    pub(crate) fn adapter(&self) -> Option<(&Adapters, usize, f32)> {
        let adapting = self.adapting.as_ref()?;
        let (rank, factor) = adapting.linear(&self.path, self.without_adapters)?;
        Some((&adapting.adapters, rank, factor))
    }

    /// A new parameter here.
    pub fn param(&self, name: &str, shape: impl Into<Shape>, initializer: Initializer) -> Param {
        let shape = shape.into();
        let path = self.at(name).path;
        let Some(slices) = self.slices.as_ref().filter(|_| shape.numel() > 0 && shape.dims() > 0) else {
            return self.register(Param::new(path, shape, initializer));
        };
        match (self.cut, slices.between()) {
            (Some(Cut::Entries), _) => self.param_part(name, shape, 0, Cut::Entries, slices, initializer),
            // What ranks use for their own heads or tokens alone has a summand of its gradient on each.
            (Some(Cut::Shared), _) | (_, Between::OwnTokens) => {
                self.param_part(name, shape, 0, Cut::Shared, slices, initializer)
            }
            _ => self.register(Param::new(path, shape, initializer)),
        }
    }

    /// A new parameter here of which this rank holds a part of dim `dim`.
    pub(crate) fn param_part(
        &self,
        name: &str,
        whole: impl Into<Shape>,
        dim: usize,
        cut: Cut,
        slices: &Slices,
        initializer: Initializer,
    ) -> Param {
        let whole = whole.into();
        let group = slices.group();
        let held = cut.held(whole[dim], group.rank(), group.size());
        self.param_slice(name, whole, dim, held, initializer)
    }

    fn param_slice(
        &self,
        name: &str,
        whole: Shape,
        dim: usize,
        held: Held,
        initializer: Initializer,
    ) -> Param {
        let path = self.at(name).path;
        let param = match Slice::new(whole, dim, held.ranges) {
            Ok(slice) => Param::sliced(path, slice.held_by(held.holders), initializer),
            // What cannot be cut stays whole: models refuse it before they are built.
            Err(_) => Param::new(path, whole, initializer),
        };
        self.register(param)
    }

    fn register(&self, mut param: Param) -> Param {
        if let Some(unit) = self.unit {
            param = param.in_unit(unit);
        }
        if let Some(adapting) = self.adapting.as_ref().filter(|_| part_of(param.name()).is_none()) {
            param.set_trainable(adapting.trains(param.name()));
        }
        let mut registered = self.registered();
        registered.params.push(param.clone());
        if let Some(holder) = self.holder {
            registered.holders.insert(param.id(), holder);
        }
        param
    }

    /// Registers a state of the layer that is made here.
    pub fn state(&self, name: &str, state: Arc<dyn LayerState>) {
        self.registered().states.insert(self.at(name).path, state);
    }

    /// Says that `param`, which has a place of its own, is used here too: other programs' files name a tied parameter
    /// at each of its places.
    pub fn tie(&self, name: &str, param: &Param) {
        self.registered().aliases.insert(self.at(name).path, param.name().to_owned());
    }

    /// Every parameter made so far anywhere in this model, in order.
    pub fn parameters(&self) -> Parameters {
        self.registered().clone()
    }

    fn registered(&self) -> MutexGuard<'_, Parameters> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers of a layer that are no parameter and get no gradient, yet decide what it computes: whoever saves the model saves
/// them too. All ranks have the same ones.
pub trait LayerState: std::fmt::Debug + Send + Sync {
    /// The numbers as they are.
    fn values(&self) -> Vec<f32>;
    /// Takes saved ones; an error where they cannot be this layer's.
    fn set(&self, values: &[f32]) -> ferrospeed_tensor::Result<()>;
}

/// A model's parameters in order; each once, however often it is used.
#[derive(Debug, Clone, Default)]
pub struct Parameters {
    params: Vec<Param>,
    aliases: BTreeMap<String, String>,
    /// By the parameter's number.
    holders: BTreeMap<u64, Holder>,
    states: BTreeMap<String, Arc<dyn LayerState>>,
}

impl Parameters {
    /// All handles.
    pub fn as_slice(&self) -> &[Param] {
        &self.params
    }

    /// The other names of tied parameters, each with the name that the parameter has here.
    pub fn aliases(&self) -> &BTreeMap<String, String> {
        &self.aliases
    }

    /// What layers keep besides parameters, by name.
    pub fn states(&self) -> &BTreeMap<String, Arc<dyn LayerState>> {
        &self.states
    }

    /// Which rank holds a parameter; `None` where all ranks hold it.
    pub fn holder(&self, param: &Param) -> Option<Holder> {
        self.holders.get(&param.id()).copied()
    }

    /// All names.
    pub fn names(&self) -> Vec<&str> {
        self.params.iter().map(Param::name).collect()
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.params.iter().find(|param| param.name() == name)
    }

    /// How many elements there are.
    pub fn numel(&self) -> usize {
        self.params.iter().map(Param::numel).sum()
    }

    /// How many the wholes have that these are slices of.
    pub fn whole_numel(&self) -> usize {
        self.params.iter().map(|param| param.whole_shape().numel()).sum()
    }

    /// Freezes every parameter whose name matches `pattern` (`*` stands for anything) and says how many did.
    pub fn freeze(&self, pattern: &str) -> usize {
        let matching: Vec<&Param> =
            self.params.iter().filter(|param| matches(pattern, param.name())).collect();
        matching.iter().for_each(|param| param.set_trainable(false));
        matching.len()
    }

    /// The parameters of every module whose path matches `pattern` (`*` stands for anything), by module, in order.
    pub fn modules(&self, pattern: &str) -> Vec<Parameters> {
        let module_of = |name: &str| {
            let ends = name.match_indices('.').map(|(end, _)| end);
            ends.map(|end| name[..end].to_owned()).find(|path| matches(pattern, path))
        };
        let mut paths: Vec<String> = Vec::new();
        let mut modules: Vec<Parameters> = Vec::new();
        for param in &self.params {
            let Some(path) = module_of(param.name()) else { continue };
            let at = paths.iter().rposition(|known| *known == path).unwrap_or_else(|| {
                paths.push(path);
                modules.push(Parameters::default());
                modules.len() - 1
            });
            modules[at].params.push(param.clone());
        }
        modules
    }

    /// Splits by a rule, in order: those it holds for, and the others. For parameter groups.
    pub fn partition(&self, rule: impl Fn(&Param) -> bool) -> (Parameters, Parameters) {
        let (yes, no): (Vec<Param>, Vec<Param>) = self.params.iter().cloned().partition(rule);
        let part = |params| Parameters { params, holders: self.holders.clone(), ..Parameters::default() };
        (part(yes), part(no))
    }
}

impl FromIterator<Param> for Parameters {
    fn from_iter<I: IntoIterator<Item = Param>>(params: I) -> Self {
        Parameters { params: params.into_iter().collect(), ..Parameters::default() }
    }
}

/// Whether `name` matches a pattern in which `*` stands for any run of characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        assert!(matches("a.b", "a.b") && !matches("a.b", "a.bc") && !matches("a", "b"));
        assert!(matches("*", "anything") && matches("h.*.weight", "h.3.mlp.weight"));
        assert!(matches("*.bias", "x.bias") && !matches("*.bias", "x.bias.y") && !matches("h.*.w", "h.w"));
    }

    #[test]
    fn modules_are_found_by_their_paths() {
        let init = Init::root();
        for name in ["h.0.moe.gate", "h.0.moe.experts.1.w", "h.0.mlp.w", "h.1.moe.gate", "moe"] {
            init.param(name, [1], Initializer::Constant(0.0));
        }
        let modules = init.parameters().modules("h.*.moe");
        let names: Vec<Vec<&str>> = modules.iter().map(Parameters::names).collect();
        assert_eq!(names, [vec!["h.0.moe.gate", "h.0.moe.experts.1.w"], vec!["h.1.moe.gate"]]);
        assert!(init.parameters().modules("nothing").is_empty());
    }

    #[test]
    fn freezing_reaches_exactly_the_matches() {
        let init = Init::root();
        for name in ["a.weight", "a.bias", "b.weight"] {
            init.param(name, [1], Initializer::Constant(0.0));
        }
        let parameters = init.parameters();
        assert_eq!(parameters.freeze("a.*"), 2);
        assert!(!parameters.get("a.bias").unwrap().is_trainable());
        assert!(parameters.get("b.weight").unwrap().is_trainable());
    }
}
