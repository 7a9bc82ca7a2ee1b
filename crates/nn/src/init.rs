//! Where parameters are born: named by path, listed in order, without values.

use std::sync::{Arc, Mutex};

use ferrospeed_tensor::{Initializer, Param, Shape};

/// A place in the tree of modules.
#[derive(Debug, Clone)]
pub struct Init {
    path: String,
    registered: Arc<Mutex<Vec<Param>>>,
}

impl Init {
    /// The root of a new model.
    pub fn root() -> Init {
        Init { path: String::new(), registered: Arc::default() }
    }

    /// The place `name` below this one. Dots in `name` go several levels down; an empty name stays here.
    pub fn at(&self, name: impl std::fmt::Display) -> Init {
        let name = name.to_string();
        let path = match (self.path.is_empty(), name.is_empty()) {
            (true, _) => name,
            (_, true) => self.path.clone(),
            _ => format!("{}.{name}", self.path),
        };
        Init { path, registered: self.registered.clone() }
    }

    /// A new parameter here.
    pub fn param(&self, name: &str, shape: impl Into<Shape>, initializer: Initializer) -> Param {
        let param = Param::new(self.at(name).path, shape, initializer);
        self.registered.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(param.clone());
        param
    }

    /// Every parameter made so far anywhere in this model, in order.
    pub fn parameters(&self) -> Parameters {
        Parameters(self.registered.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone())
    }
}

/// A model's parameters in order; each once, however often it is used.
#[derive(Debug, Clone, Default)]
pub struct Parameters(Vec<Param>);

impl Parameters {
    /// All handles.
    pub fn as_slice(&self) -> &[Param] {
        &self.0
    }

    /// All names.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(Param::name).collect()
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Param> {
        self.0.iter().find(|param| param.name() == name)
    }

    /// How many elements there are.
    pub fn numel(&self) -> usize {
        self.0.iter().map(Param::numel).sum()
    }

    /// Freezes every parameter whose name matches `pattern` (`*` stands for anything) and says how many did.
    pub fn freeze(&self, pattern: &str) -> usize {
        let matching: Vec<&Param> = self.0.iter().filter(|param| matches(pattern, param.name())).collect();
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
        for param in &self.0 {
            let Some(path) = module_of(param.name()) else { continue };
            let at = paths.iter().rposition(|known| *known == path).unwrap_or_else(|| {
                paths.push(path);
                modules.push(Parameters::default());
                modules.len() - 1
            });
            modules[at].0.push(param.clone());
        }
        modules
    }

    /// Splits by a rule, in order: those it holds for, and the others. For parameter groups.
    pub fn partition(&self, rule: impl Fn(&Param) -> bool) -> (Parameters, Parameters) {
        let (yes, no) = self.0.iter().cloned().partition(rule);
        (Parameters(yes), Parameters(no))
    }
}

impl FromIterator<Param> for Parameters {
    fn from_iter<I: IntoIterator<Item = Param>>(params: I) -> Self {
        Parameters(params.into_iter().collect())
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
