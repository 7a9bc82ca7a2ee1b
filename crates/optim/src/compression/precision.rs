//! In how many bits weights are quantised at which step: fewer and fewer, at steps ever further apart ("mixture of
//! quantisation").

use ferrospeed_tensor::fake_quantize::Levels;

/// How bits become fewer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BitSchedule {
    /// Bits at the start.
    pub start_bits: u64,
    /// Bits at the end.
    pub target_bits: u64,
    /// The step that takes the first bit.
    pub period: u64,
    /// How much longer than twice the last period each is.
    pub factor: u64,
    /// Where exact values are mixed in: how much less of them with every step since the last bit went.
    pub change_ratio: Option<f64>,
}

/// What holds in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Precision {
    /// Bits of a value.
    pub bits: u64,
    /// The step that takes the next bit, were there one to take.
    pub period: u64,
    /// How much of exact values is mixed in. As the last of it goes, rounding may leave a little less than nothing.
    pub exact_share: f64,
}

impl BitSchedule {
    /// What holds in the `step`-th step of quantisation, from 1.
    pub fn at(&self, step: u64) -> Precision {
        let (mut bits, mut period, mut changed_at) = (self.start_bits, self.period, 0);
        while bits > self.target_bits {
            // One bit goes in a step, however short the period.
            let next = period.max(changed_at + 1);
            if next > step {
                break;
            }
            bits -= 1;
            period = period.saturating_mul(2).saturating_mul(self.factor);
            changed_at = next;
        }
        Precision { bits, period, exact_share: self.exact_share(step - changed_at) }
    }

    /// How much of exact values there is so many steps after a bit went, or after the start.
    fn exact_share(&self, steps: u64) -> f64 {
        let Some(change) = self.change_ratio else { return 1.0 };
        let mut share = 1.0;
        // One by one, since sums of rounded numbers are no product.
        for _ in 0..steps {
            if share <= 0.0 {
                return 0.0;
            }
            share -= change;
        }
        share
    }

    /// Why it cannot be followed with these levels.
    pub fn flaw(&self, symmetric: bool) -> Option<String> {
        let (start, target) = (self.start_bits, self.target_bits);
        if target > start {
            return Some(format!(
                "target_bits {target} are more than start_bits {start}: bits only become fewer"
            ));
        }
        [target, start].into_iter().find_map(|bits| Levels::of(bits, symmetric).err())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_go_one_by_one_at_doubling_steps() {
        let schedule =
            BitSchedule { start_bits: 8, target_bits: 5, period: 2, factor: 1, change_ratio: None };
        let bits: Vec<u64> = (1..=9).map(|step| schedule.at(step).bits).collect();
        assert_eq!(bits, [8, 7, 7, 6, 6, 6, 6, 5, 5]);
        assert_eq!(schedule.at(u64::MAX).bits, 5);
    }
}
