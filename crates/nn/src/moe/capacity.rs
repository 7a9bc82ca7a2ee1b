//! Who keeps a place in an expert of bounded capacity. Pure functions over the router's numbers on the host.
//!
//! Where DeepSpeed leaves a tie to its framework (an overfull expert without random selection), the first tokens stay.

/// How many tokens an expert takes: the even share times the factor, rounded up, and never less than `min`. In f32, as it
/// was defined.
pub fn capacity(tokens: usize, experts: usize, factor: f32, min: usize) -> usize {
    let share = (tokens as f32 / experts as f32) * factor;
    (share.ceil() as usize).max(min)
}

/// The choices of all tokens, `[tokens · chosen]`, and what became of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The expert of each choice.
    pub experts: Vec<usize>,
    /// Its place in that expert, or `None` where it was dropped.
    pub places: Vec<Option<usize>>,
    /// How many tokens chose each expert, before any was dropped.
    pub counts: Vec<usize>,
    /// The capacity that held.
    pub capacity: usize,
}

/// The largest of a row, the first where several are.
fn largest(row: impl IntoIterator<Item = f32>) -> usize {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, value) in row.into_iter().enumerate() {
        if index == 0 || value > best.1 {
            best = (index, value);
        }
    }
    best.0
}

/// How an expert's capacity is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limit {
    /// The factor of [`capacity`].
    pub factor: f32,
    /// Its least.
    pub min: usize,
    /// Whether it holds; otherwise it grows to the fullest expert.
    pub drops: bool,
}

fn column_counts(choices: &[usize], experts: usize) -> Vec<usize> {
    let mut counts = vec![0; experts];
    choices.iter().filter(|&&expert| expert < experts).for_each(|&expert| counts[expert] += 1);
    counts
}

/// One choice per token: the largest of `scores [tokens, experts]`. A token that is not used chooses none. Where an expert
/// is overfull, those with the largest `priority [tokens, experts]` stay, or without it the first.
///
/// `Err` says why there is no answer: fewer tokens than the least capacity, which DeepSpeed refuses too.
pub fn top1(
    scores: &[f32],
    experts: usize,
    used: Option<&[bool]>,
    priority: Option<&[f32]>,
    limit: Limit,
) -> Result<Assignment, String> {
    let tokens = scores.len() / experts;
    if tokens < limit.min {
        return Err(format!(
            "{tokens} tokens are fewer than the least capacity of {}: lower it, or give more tokens",
            limit.min
        ));
    }
    let is_used = |token: usize| used.is_none_or(|used| used[token]);
    // A token that is not used is counted nowhere: it chooses the expert behind the last.
    let chosen: Vec<usize> = scores
        .chunks_exact(experts)
        .enumerate()
        .map(|(token, row)| if is_used(token) { largest(row.iter().copied()) } else { experts })
        .collect();
    let counts = column_counts(&chosen, experts);
    let capacity = match limit.drops {
        true => capacity(tokens, experts, limit.factor, limit.min),
        false => counts.iter().copied().max().unwrap_or(0),
    };
    let capacity = capacity.min(tokens);
    let mut places = vec![None; tokens];
    for expert in 0..experts {
        let mut own: Vec<usize> = (0..tokens).filter(|&token| chosen[token] == expert).collect();
        if let Some(priority) = priority
            && own.len() > capacity
        {
            let of = |token: usize| priority[token * experts + expert];
            own.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
            own.truncate(capacity);
            own.sort_unstable();
        }
        own.truncate(capacity);
        own.iter().enumerate().for_each(|(place, &token)| places[token] = Some(place));
    }
    Ok(Assignment { experts: chosen, places, counts, capacity })
}

/// `chosen` choices per token: the largest of `gates`, then the largest of `others` that are not chosen yet. All first
/// choices come before all second ones, and so on.
pub fn top_k(gates: &[f32], others: &[f32], experts: usize, chosen: usize, limit: Limit) -> Assignment {
    let tokens = gates.len() / experts;
    let mut all = vec![0; tokens * chosen];
    for token in 0..tokens {
        let row = token * experts..(token + 1) * experts;
        let mine = &mut all[token * chosen..(token + 1) * chosen];
        mine[0] = largest(gates[row.clone()].iter().copied());
        for choice in 1..chosen {
            let (before, rest) = mine.split_at_mut(choice);
            let free = others[row.clone()].iter().enumerate();
            rest[0] = largest(free.map(|(i, &v)| if before.contains(&i) { f32::NEG_INFINITY } else { v }));
        }
    }
    let counts = column_counts(&all, experts);
    let capacity = match limit.drops {
        true => capacity(tokens, experts, chosen as f32 * limit.factor, limit.min),
        false => counts.iter().copied().max().unwrap_or(0),
    };
    let mut places = vec![None; all.len()];
    let mut next = vec![0; experts];
    for choice in 0..chosen {
        for token in 0..tokens {
            let slot = token * chosen + choice;
            let place = next[all[slot]];
            next[all[slot]] += 1;
            places[slot] = (place < capacity).then_some(place);
        }
    }
    Assignment { experts: all, places, counts, capacity }
}
