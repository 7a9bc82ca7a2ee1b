//! Optimizer groups of a model with experts: expert parameters apart from the others, as each kind is spread over other
//! ranks.
//!
//! DeepSpeed starts with an empty group where the first parameter alone is over the limit; here no group is empty but one
//! that was given so.

/// A group as it was given: of each parameter its size, and which expert group it is of, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlan<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its parameters in order: elements, and the expert group.
    pub params: Vec<(usize, Option<&'a str>)>,
}

/// A group as it will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedGroup<'a> {
    /// The given group's, or the expert group's.
    pub name: &'a str,
    /// Whether it holds experts.
    pub is_moe: bool,
    /// The given group whose settings it has.
    pub origin: usize,
    /// Its parameters, by their place in that group.
    pub params: Vec<usize>,
}

/// Splits groups: first the given ones without their experts, then for each of them its experts by expert group, cut where a
/// group would exceed `max_elements`.
pub fn split_param_groups<'a>(
    groups: &[GroupPlan<'a>],
    max_elements: Option<usize>,
) -> Vec<PlannedGroup<'a>> {
    let mut planned: Vec<PlannedGroup<'a>> = Vec::new();
    for (origin, group) in groups.iter().enumerate() {
        let dense = (0..group.params.len()).filter(|&index| group.params[index].1.is_none());
        planned.push(PlannedGroup { name: group.name, is_moe: false, origin, params: dense.collect() });
    }
    for (origin, group) in groups.iter().enumerate() {
        let mut names: Vec<&'a str> = Vec::new();
        for name in group.params.iter().filter_map(|(_, name)| *name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for name in names {
            let mut held = 0usize;
            let mut params: Vec<usize> = Vec::new();
            let mut close = |params: &mut Vec<usize>| {
                let params = std::mem::take(params);
                planned.push(PlannedGroup { name, is_moe: true, origin, params });
            };
            for (index, &(elements, of)) in group.params.iter().enumerate() {
                if of != Some(name) {
                    continue;
                }
                if !params.is_empty() && max_elements.is_some_and(|most| held + elements > most) {
                    close(&mut params);
                    held = 0;
                }
                params.push(index);
                held += elements;
            }
            close(&mut params);
        }
    }
    planned
}
