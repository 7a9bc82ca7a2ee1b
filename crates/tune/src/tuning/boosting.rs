//! Boosted regression trees: what the model-based tuner expects of configurations it has not tried.
//!
//! Friedman (2001), in the shape DeepSpeed gives it: ten rounds of trees three deep, each taken at 0.3 of its word.

const ROUNDS: usize = 10;
const DEPTH: usize = 3;
const RATE: f64 = 0.3;
/// Added to the number of samples of a leaf, so that a leaf of one does not shout.
const REGULARISATION: f64 = 1.0;

enum Tree {
    Leaf(f64),
    Split { feature: usize, below: f64, left: Box<Tree>, right: Box<Tree> },
}

/// A sum of trees.
pub(super) struct Boosted(Vec<Tree>);

impl Boosted {
    /// Learns from samples and what they measured.
    pub(super) fn fit(samples: &[&[f64]], targets: &[f64]) -> Boosted {
        let mut rest = targets.to_vec();
        let mut trees = Vec::with_capacity(ROUNDS);
        let all: Vec<usize> = (0..samples.len()).collect();
        for _ in 0..ROUNDS {
            let tree = grow(samples, &rest, &all, DEPTH);
            for (rest, sample) in rest.iter_mut().zip(samples) {
                *rest -= RATE * tree.at(sample);
            }
            trees.push(tree);
        }
        Boosted(trees)
    }

    /// What is expected of a sample.
    pub(super) fn at(&self, sample: &[f64]) -> f64 {
        self.0.iter().map(|tree| RATE * tree.at(sample)).sum()
    }
}

impl Tree {
    fn at(&self, sample: &[f64]) -> f64 {
        match self {
            Tree::Leaf(value) => *value,
            Tree::Split { feature, below, left, right } => {
                let side = if sample.get(*feature).is_some_and(|value| value < below) { left } else { right };
                side.at(sample)
            }
        }
    }
}

fn sum(targets: &[f64], of: &[usize]) -> f64 {
    of.iter().map(|&index| targets[index]).sum()
}

/// How much of the squares a leaf explains.
fn score(targets: &[f64], of: &[usize]) -> f64 {
    sum(targets, of).powi(2) / (of.len() as f64 + REGULARISATION)
}

fn grow(samples: &[&[f64]], targets: &[f64], of: &[usize], depth: usize) -> Tree {
    let leaf = Tree::Leaf(sum(targets, of) / (of.len() as f64 + REGULARISATION));
    if depth == 0 || of.len() < 2 {
        return leaf;
    }
    let whole = score(targets, of);
    let mut best: Option<(f64, usize, f64)> = None;
    for feature in 0..samples[of[0]].len() {
        let mut values: Vec<f64> = of.iter().map(|&index| samples[index][feature]).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        for pair in values.windows(2) {
            let below = (pair[0] + pair[1]) / 2.0;
            let (left, right) = parted(samples, of, feature, below);
            let gain = score(targets, &left) + score(targets, &right) - whole;
            if gain > best.map_or(0.0, |(gain, _, _)| gain) {
                best = Some((gain, feature, below));
            }
        }
    }
    let Some((_, feature, below)) = best else { return leaf };
    let (left, right) = parted(samples, of, feature, below);
    let grow = |of: &[usize]| Box::new(grow(samples, targets, of, depth - 1));
    Tree::Split { feature, below, left: grow(&left), right: grow(&right) }
}

fn parted(samples: &[&[f64]], of: &[usize], feature: usize, below: f64) -> (Vec<usize>, Vec<usize>) {
    of.iter().partition(|&&index| samples[index][feature] < below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_rank_what_they_have_not_seen() {
        let sample = |x: u32, y: u32| vec![f64::from(x), f64::from(y)];
        let value = |x: u32, y: u32| f64::from(x) / 8.0 + if y > 3 { 0.5 } else { 0.0 };
        let seen: Vec<(u32, u32)> = (0..8).flat_map(|x| [(x, 1), (x, 6)]).collect();
        let samples: Vec<Vec<f64>> = seen.iter().map(|&(x, y)| sample(x, y)).collect();
        let rows: Vec<&[f64]> = samples.iter().map(Vec::as_slice).collect();
        let targets: Vec<f64> = seen.iter().map(|&(x, y)| value(x, y)).collect();
        let model = Boosted::fit(&rows, &targets);
        assert!(model.at(&sample(7, 5)) > model.at(&sample(7, 2)));
        assert!(model.at(&sample(7, 2)) > model.at(&sample(0, 2)));
        // Nothing to learn from is no reason to fail.
        assert_eq!(Boosted::fit(&[], &[]).at(&[1.0]), 0.0);
    }
}
