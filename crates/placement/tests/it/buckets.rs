//! What travels together: every element once, in the same order on every rank.

use ferrospeed_placement::buckets::{Kind, Place, plan};
use ferrospeed_placement::layout::Layout;

#[test]
fn every_element_travels_once_and_every_owned_one_comes_home() {
    let numels = [15, 5, 14, 1, 0, 9];
    for ranks in 1..5 {
        for layout in [
            Layout::flat(&numels, ranks, false),
            Layout::flat(&numels, ranks, true),
            Layout::per_parameter(&numels, ranks),
        ] {
            for limit in [1, 16, 1000] {
                let group: Vec<(usize, usize)> = numels.iter().copied().enumerate().collect();
                let mut owned_in_all = 0;
                for rank in 0..ranks {
                    let buckets = plan(
                        std::slice::from_ref(&group),
                        std::slice::from_ref(&layout),
                        |param| if param == 2 { Kind::Leaf } else { Kind::Ordinary },
                        &[rank],
                        &[limit],
                    );
                    let places = buckets.iter().flat_map(|b| b.places.iter().flatten());
                    let travelled: usize = places.map(|place| place.len).sum();
                    assert_eq!(buckets.last().map(|b| (b.kind, &b.params[..])), Some((Kind::Leaf, &[2][..])));
                    assert_eq!(travelled, numels.iter().sum::<usize>());
                    for bucket in &buckets {
                        assert_eq!(bucket.own_numel(), bucket.counts[rank]);
                        for (seat, places) in bucket.places.iter().enumerate() {
                            let follows =
                                |pair: &[Place]| pair[0].in_bucket + pair[0].len == pair[1].in_bucket;
                            let first = places.first().filter(|_| places.windows(2).all(follows));
                            assert_eq!(bucket.whole_place(seat), first.map(|place| place.in_bucket));
                        }
                        for (&param, places) in bucket.params.iter().zip(&bucket.places) {
                            let Some(fragment) = layout.fragment(param, rank) else { continue };
                            let own = places.iter().find(|place| place.in_param == fragment.in_param);
                            assert_eq!(bucket.in_part(own.unwrap().in_bucket), fragment.in_part);
                        }
                        owned_in_all += bucket.own_numel();
                    }
                }
                assert_eq!(owned_in_all, numels.iter().sum::<usize>());
            }
        }
    }
}
