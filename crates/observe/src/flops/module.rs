//! A model as a tree of modules, and how PyTorch prints one.

use crate::flops::format::{NumberStyle, general, rounded};

/// A module and all below it; every figure includes the modules below.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Module {
    /// Its name in the module above; empty at the root.
    pub name: String,
    /// What it is.
    pub class: String,
    /// Its sizes, as text; empty where there is nothing to say.
    pub sizes: String,
    /// Parameters, each once.
    pub params: u64,
    /// Multiply-accumulates of forward.
    pub macs: u64,
    /// Floating-point operations of forward.
    pub flops: u64,
    /// Time of forward.
    pub seconds: f64,
    /// Whether it is a list: lists say nothing of themselves and join equal neighbours.
    pub is_list: bool,
    /// Whether it is the same module as a neighbour of another name: printed, but not summed again.
    pub is_repeated: bool,
    /// The modules below, in order.
    pub children: Vec<Module>,
}

impl Module {
    /// Operations per second.
    fn speed(&self) -> String {
        let speed = if self.seconds == 0.0 { 0.0 } else { rounded(self.flops as f64 / self.seconds, 2) };
        NumberStyle::default().flops(speed)
    }

    fn figures(&self, total: &Module) -> String {
        let share = |part: f64, whole: f64| {
            let percent = if whole == 0.0 { 0.0 } else { rounded(100.0 * part / whole, 2) };
            general(percent)
        };
        let style = NumberStyle::default();
        let mut text = format!(
            "{} = {}% Params, {} = {}% MACs, {} = {}% latency, {}",
            style.params(self.params as f64),
            share(self.params as f64, total.params as f64),
            style.macs(self.macs as f64),
            share(self.macs as f64, total.macs as f64),
            style.duration(self.seconds),
            share(self.seconds, total.seconds),
            self.speed()
        );
        if !self.sizes.is_empty() {
            text.push_str(", ");
            text.push_str(&self.sizes);
        }
        text
    }

    /// The tree in PyTorch's form, with the figures of each module.
    pub fn tree(&self, total: &Module) -> String {
        let figures = if self.is_list { None } else { Some(self.figures(total)) };
        if self.children.is_empty() {
            return format!("{}({})", self.class, figures.unwrap_or_default());
        }
        let mut lines: Vec<String> = figures.into_iter().collect();
        let texts: Vec<String> = self.children.iter().map(|child| child.tree(total)).collect();
        let mut at = 0;
        while at < texts.len() {
            let equal = texts[at..].iter().take_while(|text| self.is_list && **text == texts[at]).count();
            let last = at + equal.max(1) - 1;
            let (first_name, last_name) = (&self.children[at].name, &self.children[last].name);
            lines.push(match last - at {
                0 => format!("({first_name}): {}", texts[at]),
                more => format!("({first_name}-{last_name}): {} x {}", more + 1, texts[at]),
            });
            at = last + 1;
        }
        let inside = lines.join("\n").replace('\n', "\n  ");
        format!("{}(\n  {inside}\n)", self.class)
    }
}
