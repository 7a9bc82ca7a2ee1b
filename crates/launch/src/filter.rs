//! `--include` and `--exclude`: which slots of the pool take part.
//!
//! The grammar is `NODE[@NODE…]` with `NODE` = `name` or `name:slot[,slot…]`. An included slot list keeps its
//! written order (it is the rank order on that host); hosts always come back in hostfile order. Excluding a slot
//! twice is the same as excluding it once.

use indexmap::IndexMap;

use crate::error::{LaunchError, list_some, shorten};
use crate::hostfile::HostPool;

/// Hosts in rank order, each with the slots that take part in rank order.
pub type ActiveSlots = IndexMap<String, Vec<u32>>;

/// Applies the filters to a pool. The result may be empty: the caller decides whether that is an error.
pub fn apply(pool: &HostPool, include: &str, exclude: &str) -> Result<ActiveSlots, LaunchError> {
    match (include.is_empty(), exclude.is_empty()) {
        (false, false) => Err(LaunchError::FilterBoth),
        (true, true) => Ok(pool.iter().map(|(host, &slots)| (host.clone(), (0..slots).collect())).collect()),
        (false, true) => apply_include(pool, include),
        (true, false) => apply_exclude(pool, exclude),
    }
}

/// One parsed `NODE`: the host, and its slots unless the whole host is meant.
type Node<'a> = (&'a str, Option<Vec<u32>>);

fn apply_include(pool: &HostPool, filter: &str) -> Result<ActiveSlots, LaunchError> {
    let mut wanted: IndexMap<&str, Vec<u32>> = IndexMap::new();
    for node in filter.split('@') {
        let (host, slots) = parse_node(pool, filter, node)?;
        wanted.insert(host, slots.unwrap_or_else(|| (0..pool[host]).collect()));
    }
    let in_pool_order = pool.keys().filter_map(|host| {
        let slots = wanted.swap_remove(host.as_str())?;
        (!slots.is_empty()).then(|| (host.clone(), slots))
    });
    Ok(in_pool_order.collect())
}

fn apply_exclude(pool: &HostPool, filter: &str) -> Result<ActiveSlots, LaunchError> {
    let mut left: IndexMap<&str, Vec<bool>> =
        pool.iter().map(|(host, &slots)| (host.as_str(), vec![true; slots as usize])).collect();
    for node in filter.split('@') {
        let (host, slots) = parse_node(pool, filter, node)?;
        match slots {
            Some(slots) => slots.iter().for_each(|&slot| left[host][slot as usize] = false),
            None => left[host].fill(false),
        }
    }
    let remaining = left.into_iter().filter_map(|(host, kept)| {
        let slots: Vec<u32> = (0u32..).zip(kept).filter_map(|(slot, kept)| kept.then_some(slot)).collect();
        (!slots.is_empty()).then(|| (host.to_owned(), slots))
    });
    Ok(remaining.collect())
}

fn parse_node<'p>(pool: &'p HostPool, filter: &str, node: &str) -> Result<Node<'p>, LaunchError> {
    // A pool may hold IPv6 addresses, whose colons are not the grammar's: the whole node wins when it is a host.
    let (name, slots) = match pool.contains_key(node) {
        true => (node, None),
        false => match node.split_once(':') {
            Some((name, slots)) => (name, Some(slots)),
            None => (node, None),
        },
    };
    let Some((host, &available)) = pool.get_key_value(name) else {
        return Err(LaunchError::FilterUnknownHost {
            filter: shorten(filter),
            host: shorten(name),
            known: list_some(pool.keys()),
        });
    };
    let Some(slots) = slots else { return Ok((host, None)) };
    let mut seen = vec![false; available as usize];
    let mut list = Vec::new();
    for part in slots.split(',') {
        let slot = part
            .trim()
            .parse::<i64>()
            .map_err(|_| LaunchError::FilterSyntax { filter: shorten(filter), part: shorten(part) })?;
        let Some(index) = usize::try_from(slot).ok().filter(|&index| index < seen.len()) else {
            return Err(LaunchError::FilterUnknownSlot {
                filter: shorten(filter),
                host: host.clone(),
                slot: slot.to_string(),
                slots: available,
            });
        };
        if !std::mem::replace(&mut seen[index], true) {
            list.push(index as u32);
        }
    }
    Ok((host, Some(list)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> HostPool {
        [("a".to_owned(), 3), ("fe80::1".to_owned(), 2)].into_iter().collect()
    }

    #[test]
    fn an_ipv6_host_can_be_named_whole() {
        let active = apply(&pool(), "fe80::1", "").unwrap();
        assert_eq!(active["fe80::1"], [0, 1]);
    }

    #[test]
    fn excluding_a_slot_twice_excludes_it_once() {
        assert_eq!(apply(&pool(), "", "a:1,1@a:1").unwrap()["a"], [0, 2]);
    }

    #[test]
    fn an_unknown_host_is_answered_with_the_known_ones() {
        let error = apply(&pool(), "b", "").unwrap_err().to_string();
        assert_eq!(error, "filter \"b\": host \"b\" is not in the hostfile; known hosts: a, fe80::1");
    }

    #[test]
    fn a_slot_that_is_not_there_is_answered_with_the_range() {
        let error = apply(&pool(), "", "a:7").unwrap_err().to_string();
        assert_eq!(error, "filter \"a:7\": host \"a\" has no slot 7; it has slots 0 to 2");
    }
}
