//! What a model's modules cost: the counts of `tensor::profile` joined with the parameters, as a tree and as DeepSpeed's report.
//!
//! ```
//! use ferrospeed_engine::ModelProfile;
//! use ferrospeed_nn::{Init, Linear};
//! use ferrospeed_tensor::store::{FromInitializers, PlainStore};
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let (init, device) = (Init::root(), ferrospeed_cpu::device());
//! let layer = Linear::new(&init.at("proj"), 4, 2, true);
//! let params = init.parameters();
//! let _store = PlainStore::attach(params.as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
//! let x = Tensor::zeros([3, 4], DType::F32, &device)?;
//! let profile = ModelProfile::measure(&device, &params, 1, || layer.forward(&x))?;
//! assert_eq!((profile.flops(), profile.macs(), profile.params()), (48, 24, 10));
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;

use ferrospeed_nn::Parameters;
pub use ferrospeed_observe::flops::ReportOptions;
use ferrospeed_observe::flops::{Module, Summary, aggregated, report};
use ferrospeed_observe::roofline::{Peak, Place, Roofline};
use ferrospeed_tensor::profile::{self, ModuleWork, Passes, Profile};
use ferrospeed_tensor::{Device, Param};

/// A model and what its modules did.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelProfile {
    model: Module,
    profile: Profile,
}

impl ModelProfile {
    /// Runs `work` some times to warm up, then once and counts: DeepSpeed's `get_model_profile`.
    pub fn measure<R, E>(
        device: &Device,
        parameters: &Parameters,
        warm_up: u64,
        mut work: impl FnMut() -> Result<R, E>,
    ) -> Result<ModelProfile, E> {
        for _ in 0..warm_up {
            work()?;
        }
        let (result, profile) = profile::collect(device, work);
        result?;
        Ok(ModelProfile::new(profile, parameters.as_slice(), parameters.aliases()))
    }

    /// Joins counts with the parameters of the model they were taken of, and the other names of tied ones.
    pub fn new(profile: Profile, params: &[Param], aliases: &BTreeMap<String, String>) -> ModelProfile {
        let mut root = Node::default();
        for param in params {
            root.place(param.name(), param);
        }
        for (name, tied) in aliases {
            if let Some(param) = params.iter().find(|param| param.name() == tied) {
                root.place(name, param);
            }
        }
        for module in profile.modules() {
            let node = root.at(&module.path);
            node.class = module.class;
            node.sizes = module.sizes.clone();
            node.own = module.own;
        }
        ModelProfile { model: root.into_module(String::new()).0, profile }
    }

    /// The same, where modules of some classes are none: what they did, those above them did.
    pub fn without(mut self, classes: &[&str]) -> ModelProfile {
        fn pruned(module: &mut Module, classes: &[&str]) {
            let mut kept = Vec::new();
            for mut child in std::mem::take(&mut module.children) {
                pruned(&mut child, classes);
                match classes.contains(&child.class.as_str()) {
                    // Figures of a module include those below it.
                    true => kept.append(&mut child.children),
                    false => kept.push(child),
                }
            }
            module.children = kept;
        }
        pruned(&mut self.model, classes);
        self
    }

    /// The tree of modules, with what forward did.
    pub fn model(&self) -> &Module {
        &self.model
    }

    /// What each module did itself in each pass.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Floating-point operations of forward.
    pub fn flops(&self) -> u64 {
        self.model.flops
    }

    /// Multiply-accumulates of forward.
    pub fn macs(&self) -> u64 {
        self.model.macs
    }

    /// Parameters.
    pub fn params(&self) -> u64 {
        self.model.params
    }

    /// What was done in all passes.
    pub fn total(&self) -> Passes {
        self.profile.total()
    }

    /// Modules under the roof of a machine, with what all passes did; those that differ in numbers alone are one.
    pub fn roofline(&self, peak: Peak) -> Roofline {
        let place = |module: &ModuleWork| {
            let passes = [module.own.forward, module.own.backward, module.own.recomputation];
            Place {
                module: module.path.to_string(),
                flops: passes.iter().map(|work| work.flops).sum(),
                bytes: passes.iter().map(|work| work.bytes).sum(),
                seconds: passes.iter().map(|work| work.time.as_secs_f64()).sum(),
            }
        };
        Roofline::of_modules(peak, self.profile.modules().iter().map(place))
    }

    /// The modules of each level that took most, as the report has them.
    pub fn aggregated(&self, options: &ReportOptions) -> String {
        aggregated(&self.model, options)
    }

    /// The report of a model alone, at `step`.
    pub fn report(&self, step: u64, options: &ReportOptions) -> String {
        let summary = Summary {
            step,
            ranks: None,
            model_params: self.params(),
            flops_of_stages: None,
            experts: None,
            forward_s: self.model.seconds,
            phases: None,
        };
        report(&summary, &self.model, options)
    }
}

/// A place in the tree while it is put together.
#[derive(Default)]
struct Node<'a> {
    class: Option<&'static str>,
    sizes: String,
    own: Passes,
    params: Vec<&'a Param>,
    children: Vec<(String, Node<'a>)>,
}

impl<'a> Node<'a> {
    /// The node at `path` below this one; made where it is not there yet.
    fn at(&mut self, path: &str) -> &mut Node<'a> {
        if path.is_empty() {
            return self;
        }
        let (name, rest) = path.split_once('.').unwrap_or((path, ""));
        let index = self.children.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.children.push((name.to_owned(), Node::default()));
            self.children.len() - 1
        });
        self.children[index].1.at(rest)
    }

    fn place(&mut self, name: &str, param: &'a Param) {
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        self.at(module).params.push(param);
    }

    /// The module with all below it, and the sizes of its parameters, each once.
    fn into_module(mut self, name: String) -> (Module, BTreeMap<u64, u64>) {
        let is_numbered = |(name, _): &(String, Node<'_>)| name.parse::<u64>().is_ok();
        let is_list = !self.children.is_empty() && self.children.iter().all(is_numbered);
        if is_list {
            // Modules without parameters are met only when they run.
            self.children.sort_by_key(|(name, _)| name.parse::<u64>().unwrap_or(u64::MAX));
        }
        let mut params: BTreeMap<u64, u64> =
            self.params.iter().map(|param| (param.id(), param.numel() as u64)).collect();
        let mut work = self.own.forward;
        let mut children = Vec::new();
        let mut seconds = work.time.as_secs_f64();
        for (name, child) in self.children {
            let (child, below) = child.into_module(name);
            work.macs += child.macs;
            work.flops += child.flops;
            seconds += child.seconds;
            params.extend(below);
            children.push(child);
        }
        let module = Module {
            name,
            class: self.class.unwrap_or(if is_list { "ModuleList" } else { "Module" }).to_owned(),
            sizes: self.sizes,
            params: params.values().sum(),
            macs: work.macs,
            flops: work.flops,
            seconds,
            is_list: is_list && self.class.is_none(),
            is_repeated: false,
            children,
        };
        (module, params)
    }
}
