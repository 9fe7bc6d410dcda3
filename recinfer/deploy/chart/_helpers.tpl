{{- /* The prefix of all names: the release's, or nameOverride. */}}
{{- define "recinfer.name" -}}
{{- .Values.nameOverride | default .Release.Name }}
{{- end }}

{{- /* The content of shards.json: the headless Service of each group for each of its ranks. */}}
{{- define "recinfer.shards" -}}
{{- $ranks := dict }}
{{- range $number, $shard := .Values.shards }}
{{- range $rank := $shard.ranks }}
{{- $address := printf "dns:///%s-shard-%d.%s.svc:50051" (include "recinfer.name" $) $number $.Release.Namespace }}
{{- $_ := set $ranks (toString $rank) (list $address) }}
{{- end }}
{{- end }}
{{- $content := dict "format" "recinfer.shards" "version" 1 "ranks" $ranks }}
{{- if .Values.tls.secret }}
{{- $settings := dict "tls_ca" "/run/secrets/tls/ca.crt" }}
{{- if .Values.tls.clientCa }}
{{- $_ := set $settings "tls_cert" "/run/secrets/tls/tls.crt" }}
{{- $_ := set $settings "tls_key" "/run/secrets/tls/tls.key" }}
{{- end }}
{{- with .Values.tls.name }}
{{- $_ := set $settings "tls_name" . }}
{{- end }}
{{- $_ := set $content "settings" $settings }}
{{- end }}
{{- toJson $content }}
{{- end }}

{{- /* "true" if the role's number of pods is an autoscaler's; called with the values of the autoscaler and of the role. */}}
{{- define "recinfer.scales" -}}
{{- if and (ne .autoscaling.kind "none") (gt (int .role.maxReplicas) (int .role.replicas)) }}true{{ end }}
{{- end }}
