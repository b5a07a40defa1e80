//! [`components`]: the strongly connected components of a graph.

/// The strongly connected components, each in order. `leaving`: the edges of each node. Without recursion, since a flow
/// may be a chain of ten thousand operators.
pub(super) fn components<E>(leaving: &[Vec<E>], to: impl Fn(&E) -> usize) -> Vec<Vec<usize>> {
    let count = leaving.len();
    let mut arriving = vec![Vec::new(); count];
    for (from, edges) in leaving.iter().enumerate() {
        edges.iter().for_each(|edge| arriving[to(edge)].push(from));
    }
    // Kosaraju's algorithm: a depth-first walk along the edges, then one against them, in the reverse order in which
    // the first walk left the nodes.
    let (mut left, mut seen) = (Vec::with_capacity(count), vec![false; count]);
    for start in 0..count {
        let mut walk = Vec::new();
        if !std::mem::replace(&mut seen[start], true) {
            walk.push((start, leaving[start].iter()));
        }
        while let Some((node, next)) = walk.last_mut() {
            match next.next().map(&to) {
                Some(to) if !std::mem::replace(&mut seen[to], true) => walk.push((to, leaving[to].iter())),
                Some(_) => {}
                None => {
                    left.push(*node);
                    walk.pop();
                }
            }
        }
    }
    let (mut components, mut found) = (Vec::new(), vec![false; count]);
    for start in left.into_iter().rev() {
        if std::mem::replace(&mut found[start], true) {
            continue;
        }
        let (mut members, mut open) = (Vec::new(), vec![start]);
        while let Some(node) = open.pop() {
            members.push(node);
            open.extend(arriving[node].iter().filter(|from| !std::mem::replace(&mut found[**from], true)));
        }
        members.sort_unstable();
        components.push(members);
    }
    components.sort_unstable();
    components
}
